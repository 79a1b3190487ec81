"""Subscriptions as tables, lines and JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from runnel.cli.render.tables import Table, counted, printable
from runnel.cli.render.times import format_time
from runnel.config import format_duration
from runnel.formats.work_heads import MemberState, SubscriptionState, WorkOptions

_MS: Final = 1_000_000
_SECOND_NS: Final = 10**9
_PATTERNS_SHOWN: Final = 3


def subscription_table(states: Sequence[SubscriptionState], now_ns: int) -> Table:
    columns = (
        "subscription", "mode", "state", "topics", "backlog", "in flight", "delayed", "oldest",
        "redelivered", "dead", "consumers",
    )  # fmt: skip
    return Table(
        columns,
        [
            (
                state.name,
                state.mode,
                _state(state),
                patterns_text(state.patterns, len(state.patterns)),
                f"{_total(state, lambda each: each.backlog):,}",
                f"{_total(state, lambda each: each.in_flight):,}",
                f"{_total(state, lambda each: each.delayed):,}",
                age(oldest_ns(state), now_ns),
                f"{state.redelivered:,}",
                f"{state.dead:,}",
                f"{_total(state, lambda each: each.consumers):,}",
            )
            for state in states
        ],
        frozenset(columns[4:]),
    )


def subscription_lines(state: SubscriptionState, now_ns: int) -> list[str]:
    """The facts that hold for all members and partitions."""
    backlog = f"{_total(state, lambda each: each.backlog):,}"
    if oldest := oldest_ns(state):
        backlog += f", the oldest for {age(oldest, now_ns)}"
    facts = {
        "subscription": state.name,
        "mode": state.mode,
        "state": _state(state),
        "topics": " ".join(state.patterns),
        "made": f"{format_time(state.made_ns)[:19]}Z",
        **_option_facts(state.options, is_multicast=state.mode == "multicast"),
        "backlog": backlog,
        "in flight": f"{_total(state, lambda each: each.in_flight):,}",
        "delayed": f"{_total(state, lambda each: each.delayed):,}",
        "redelivered": f"{state.redelivered:,} since the broker started",
        "dead letters": f"{state.dead:,}",
        "consumers": f"{_total(state, lambda each: each.consumers):,}",
    }
    return [f"{name + ':':<13} {printable(value)}" for name, value in facts.items()]


def _option_facts(options: WorkOptions, *, is_multicast: bool) -> dict[str, str]:
    facts = {
        "lease": f"{_duration(options.lease_ms)}, renewed for {_duration(options.processing_ms_max)} "
        "at most",
        "retries": f"after {_duration(options.retry_delay_ms)}, then {options.backoff:g} times as "
        f"long each time, up to {_duration(options.retry_delay_ms_max)}",
        "gives up": f"after {counted(options.deliveries_max, 'delivery', 'deliveries')}"
        if options.deliveries_max
        else "never",
    }
    if is_multicast:
        facts["absent"] = f"members for {_duration(options.absent_ms_max)} at most"
    return facts


def member_table(state: SubscriptionState, now_ns: int) -> Table:
    """The members of a multicast. A member without a name exists while it is connected."""
    columns = ("member", "backlog", "in flight", "delayed", "oldest", "absent for")
    return Table(
        columns,
        [
            (
                member.name,
                f"{member.backlog:,}",
                f"{member.in_flight:,}",
                f"{member.delayed:,}",
                age(member.oldest_ns, now_ns),
                age(member.absent_ns, now_ns),
            )
            for member in state.members
        ],
        frozenset(columns[1:]),
    )


def partition_table(state: SubscriptionState) -> Table:
    """The progress in each partition: all messages before `next to ack`, and some after it, are acknowledged."""
    is_multicast = state.mode == "multicast"
    columns = ("topic", "partition", "next to ack", "acked beyond", "end", "backlog", "in flight")
    rows = [
        (
            *((each.member,) if is_multicast else ()),
            each.topic,
            str(each.partition),
            str(each.floor),
            f"{each.acked_beyond:,}",
            str(each.next_offset),
            f"{max(0, each.next_offset - each.floor - each.acked_beyond):,}",
            f"{each.in_flight:,}",
        )
        for each in state.partitions
    ]
    return Table((*(("member",) if is_multicast else ()), *columns), rows, frozenset(columns[1:]))


def patterns_text(patterns: Sequence[str], count: int) -> str:
    """The first few patterns, and how many there are besides."""
    shown = patterns[:_PATTERNS_SHOWN]
    hidden = count - len(shown)
    return " ".join(shown) + (f" … and {hidden:,} more" if hidden else "")


def age(since_ns: int, now_ns: int) -> str:
    """The time since `since_ns`, in whole seconds; `-` if `since_ns` is 0."""
    if not since_ns:
        return "-"
    return format_duration(max(0, now_ns - since_ns) // _SECOND_NS * _SECOND_NS)


def oldest_ns(state: SubscriptionState) -> int:
    """When the oldest message without acknowledgement was received; 0 if there is none."""
    return min((each.oldest_ns for each in state.members if each.oldest_ns), default=0)


def _total(state: SubscriptionState, of: Callable[[MemberState], int]) -> int:
    return sum(map(of, state.members))


def _state(state: SubscriptionState) -> str:
    return "paused" if state.is_paused else "active"


def _duration(duration_ms: int | None) -> str:
    return format_duration((duration_ms or 0) * _MS)


# --- JSON ---


def document(state: SubscriptionState) -> dict[str, Any]:
    """The subscription as JSON objects; on the wire it is arrays. Partitions are included if the broker sent them."""
    made: dict[str, Any] = {
        **msgspec.structs.asdict(state),
        "made": format_time(state.made_ns),
        "options": msgspec.structs.asdict(state.options),
        "members": [msgspec.structs.asdict(member) for member in state.members],
        "partitions": [msgspec.structs.asdict(each) for each in state.partitions],
    }
    if not state.partitions:
        del made["partitions"]
    return made
