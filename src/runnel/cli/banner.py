"""What `runnel serve` says when it is ready. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from runnel.cli.tables import counted, printable
from runnel.config import Keep, Retain, Settings, TopicRule, format_duration, format_size

LISTENING: Final = "listening on "

_SHOWN_MAX: Final = 20  # there may be thousands


def listening_line(addresses: Sequence[str]) -> str:
    """For programs: the addresses behind the first two words."""
    return LISTENING + " ".join(addresses)


def banner_lines(
    version: str, settings: Settings, addresses: Sequence[str], recovered: Sequence[str]
) -> list[str]:
    """For people. `recovered`: what opening the data directory found worth telling."""
    found = "clean" if not recovered else counted(len(recovered), "remark") + " below"
    lines = [
        f"Runnel {version}: {settings.node} of {settings.cluster}",
        listening_line(addresses),
        f"data in {settings.data} ({found})",
        *_rule_lines(settings.topics),
        *(f"note: {line}" for line in recovered[:_SHOWN_MAX]),
    ]
    if len(recovered) > _SHOWN_MAX:
        lines.append(f"note: … and {len(recovered) - _SHOWN_MAX:,} more")
    return [printable(line) for line in lines]


def _rule_lines(rules: Sequence[TopicRule]) -> Iterator[str]:
    if not rules:
        yield "rules: none; every topic is kept on disk, for ever, in the journal main"
        return
    yield "rules: the first that matches a new topic decides"
    for number, rule in enumerate(rules, 1):
        yield f"  {number}. {rule.match}: {', '.join(_facts(rule))}"
    yield "  then: on disk, for ever, in the journal main"


def _facts(rule: TopicRule) -> Iterator[str]:
    yield {Keep.NONE: "not kept", Keep.MEMORY: "in memory", Keep.DISK: "on disk"}[rule.keep]
    if rule.partitions > 1:
        yield counted(rule.partitions, "partition")
    if rule.keep is not Keep.NONE:
        yield f"journal {rule.match if rule.journal is None else rule.journal}"
        yield _retained(rule.retain)
    if rule.last_value:
        yield "last value"


def _retained(retain: Retain) -> str:
    bounds = []
    if retain.age_ns is not None:
        bounds.append(format_duration(retain.age_ns))
    if retain.bytes_max is not None:
        bounds.append(format_size(retain.bytes_max))
    if retain.until is not None:
        bounds.append(f"until {retain.until.value}")
    return f"retained {' or '.join(bounds)}" if bounds else "for ever"
