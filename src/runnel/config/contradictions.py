"""Finds settings that are each allowed but contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from runnel.config.keys import RULE_KEYS, key_named
from runnel.config.layers import Given, Origin
from runnel.config.settings import IN_MEMORY, MIB, Keep
from runnel.config.units import format_size

# The pseudo-journal of ephemeral topics.
LIVE_JOURNAL: Final = "live"
# In a journal's name: every topic has its own journal, so rules with this placeholder need not agree.
TOPIC_PLACEHOLDER: Final = "{topic}"

# A journal has one policy, so all rules that write to it must agree on these keys.
_JOURNAL_PARTS: Final = ("keep", "rotate.", "retain.", "pin.")
# These keys say how messages are stored, so they have no meaning for messages that are not stored.
STORED_PARTS: Final = ("journal", "rotate.", "retain.", "pin.")

# (smaller, larger, why): the first must not exceed the second.
_ORDERED: Final = (
    (
        "limits.message_bytes_max",
        "limits.batch_bytes_max",
        "a batch has to hold the largest message",
    ),
    ("limits.batch_bytes_max", "log.group_bytes_max", "one write has to hold the largest batch"),
    ("log.group_bytes_max", "log.write_queue_bytes_max", "the queue has to hold one full write"),
    (
        "log.last_value_bytes_max",
        "log.catalogue_log_bytes_max",
        "the catalogue's log has to hold the largest last value",
    ),
)

_PORT_MAX: Final = 65_535

# A frame holds its head and the batch's envelope, which has a part for each run, beside the batch's body.
_BESIDE_BATCH_BYTES: Final = MIB


class Contradiction(Struct, frozen=True):
    """A contradiction: its error text and the keys it is about."""

    keys: tuple[str, ...]
    text: str


def find_contradictions(values: Mapping[str, Given], rule_count: int) -> Iterator[Contradiction]:
    """Every contradiction among the effective values."""
    for smaller, larger, why in _ORDERED:
        yield from _ordered(values, smaller, larger, why)
    yield from _frame_and_batch(values)
    yield from _processes_without_directory(values)
    yield from _ports_of_nodes(values)
    rules = [f"topics[{index}]." for index in range(rule_count)]
    for rule in rules:
        yield from _within_rule(values, rule)
    yield from _shadowed(values, rules)
    yield from _shared_journals(values, rules)


def named(values: Mapping[str, Given], name: str) -> str:
    """`key = value (source)`, as every message names a setting."""
    given = values[name]
    return f"{name} = {key_named(name).write(given.value)} ({given.source})"


def _ordered(
    values: Mapping[str, Given], smaller: str, larger: str, why: str
) -> Iterator[Contradiction]:
    low, high = values[smaller].value, values[larger].value
    if isinstance(low, int) and isinstance(high, int) and low > high:
        text = f"{named(values, smaller)} is more than {named(values, larger)}: {why}"
        yield Contradiction((smaller, larger), text)


def _frame_and_batch(values: Mapping[str, Given]) -> Iterator[Contradiction]:
    frame, batch = "native.frame_bytes_max", "limits.batch_bytes_max"
    frame_bytes, batch_bytes = values[frame].value, values[batch].value
    if not isinstance(frame_bytes, int) or not isinstance(batch_bytes, int):
        return
    needed = batch_bytes + _BESIDE_BATCH_BYTES
    if frame_bytes < needed:
        text = (
            f"{named(values, frame)} is too small for {named(values, batch)}: a frame has to hold the largest "
            f"batch and {format_size(_BESIDE_BATCH_BYTES)} beside it, {format_size(needed)} together"
        )
        yield Contradiction((frame, batch), text)


def _processes_without_directory(values: Mapping[str, Given]) -> Iterator[Contradiction]:
    data, processes = "data", "cluster.processes"
    if values[data].value == IN_MEMORY and values[processes].value != 1:
        text = (
            f"{named(values, processes)} cannot be with {named(values, data)}: several processes share a directory; "
            f"set {data} to one, or {processes} = 1"
        )
        yield Contradiction((data, processes), text)


def _ports_of_nodes(values: Mapping[str, Given]) -> Iterator[Contradiction]:
    port, processes = "cluster.first_port", "cluster.processes"
    first, count = values[port].value, values[processes].value
    if isinstance(first, int) and isinstance(count, int) and first + count - 1 > _PORT_MAX:
        text = (
            f"{named(values, port)} leaves too few ports for {named(values, processes)}: each process has one, "
            f"the last {_PORT_MAX}"
        )
        yield Contradiction((port, processes), text)


def _within_rule(values: Mapping[str, Given], rule: str) -> Iterator[Contradiction]:
    yield from _ordered(
        values,
        f"{rule}partitions",
        "limits.partitions_max",
        "lower the one or raise the other",
    )
    yield from _ordered(
        values,
        f"{rule}rotate.bytes",
        f"{rule}retain.bytes",
        "retention removes whole segments, so they have to be smaller",
    )
    yield from _ordered(
        values,
        f"{rule}rotate.at",
        f"{rule}rotate.every",
        "the times of rotation repeat within it",
    )
    if values[f"{rule}keep"].value == Keep.NONE:
        for part in RULE_KEYS:
            name = f"{rule}{part}"
            explicit = values[name].source.origin is not Origin.DEFAULT
            if part.startswith(STORED_PARTS) and explicit:
                text = f"{named(values, name)} has no effect with {named(values, f'{rule}keep')}"
                yield Contradiction((name, f"{rule}keep"), f"{text}: such messages are not stored")


def _shadowed(values: Mapping[str, Given], rules: list[str]) -> Iterator[Contradiction]:
    first_of: dict[str, str] = {}
    for rule in rules:
        name = f"{rule}match"
        pattern = str(values[name].value)
        earlier = first_of.get(pattern)
        # Only patterns that begin with "!" match the system's topics, so "*" does not shadow them.
        if earlier is None and not pattern.startswith("!"):
            earlier = first_of.get("*")
        if earlier is not None:
            text = (
                f"{named(values, name)} can never apply: the first match decides, "
                f"and {named(values, earlier)} comes before it"
            )
            yield Contradiction((name, earlier), text)
        first_of.setdefault(pattern, name)


def _shared_journals(values: Mapping[str, Given], rules: list[str]) -> Iterator[Contradiction]:
    first_users: dict[object, str] = {}
    for rule in rules:
        name = f"{rule}journal"
        journal = values[name].value
        if journal == LIVE_JOURNAL:
            text = f"{named(values, name)} is the name for topics that are not kept; choose another"
            yield Contradiction((name,), text)
        elif journal is not None and TOPIC_PLACEHOLDER not in str(journal):
            earlier = first_users.setdefault(journal, rule)
            yield from _disagreements(values, earlier, rule)


def _disagreements(values: Mapping[str, Given], earlier: str, rule: str) -> Iterator[Contradiction]:
    for part in RULE_KEYS:
        names = (f"{rule}{part}", f"{earlier}{part}")
        if not part.startswith(_JOURNAL_PARTS):
            continue
        if values[names[0]].value != values[names[1]].value:
            text = (
                f"{named(values, names[0])} differs from {named(values, names[1])}, "
                f"but both rules share {named(values, f'{rule}journal')}"
            )
            yield Contradiction((*names, f"{rule}journal"), text)
