"""The lines that `runnel serve` prints when it is ready. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from runnel.cli.render.tables import counted, printable
from runnel.config import (
    IN_MEMORY,
    Keep,
    LogSettings,
    Retain,
    Settings,
    TopicRule,
    format_duration,
    format_size,
)

LISTENING: Final = "listening on "

_SHOWN_MAX: Final = 20  # there may be thousands


def listening_line(addresses: Sequence[str]) -> str:
    """The line for programs: the addresses follow the first two words."""
    return LISTENING + " ".join(addresses)


def banner_lines(
    version: str, settings: Settings, addresses: Sequence[str], recovered: Sequence[str]
) -> list[str]:
    """The lines for people. `recovered` contains the remarks of opening the data directory."""
    found = "clean" if not recovered else counted(len(recovered), "remark") + " below"
    is_lost = settings.data == IN_MEMORY
    lines = [
        f"Runnel {version}: {settings.cluster.node} of {settings.cluster.name}",
        listening_line(addresses),
        "everything is in memory, and lost when this ends"
        if is_lost
        else f"data in {settings.data} ({found})",
        *_rule_lines(settings),
        *(f"note: {line}" for line in recovered[:_SHOWN_MAX]),
    ]
    if len(recovered) > _SHOWN_MAX:
        lines.append(f"note: … and {len(recovered) - _SHOWN_MAX:,} more")
    return [printable(line) for line in lines]


def _rule_lines(settings: Settings) -> Iterator[str]:
    default = TopicRule(match="*", journal="main")
    if not settings.topics:
        yield f"rules: none; every topic is kept {', '.join(_facts(default, settings))}"
        return
    yield "rules: the first that matches a new topic decides"
    for number, rule in enumerate(settings.topics, 1):
        yield f"  {number}. {rule.match}: {', '.join(_facts(rule, settings))}"
    yield f"  then: {', '.join(_facts(default, settings))}"


def _facts(rule: TopicRule, settings: Settings) -> Iterator[str]:
    keep = rule.keep
    if keep is Keep.DISK and settings.data == IN_MEMORY:
        keep = Keep.MEMORY
    yield {Keep.NONE: "not kept", Keep.MEMORY: "in memory", Keep.DISK: "on disk"}[keep]
    if rule.partitions > 1:
        yield counted(rule.partitions, "partition")
    if keep is not Keep.NONE:
        yield f"journal {rule.match if rule.journal is None else rule.journal}"
        yield _retained(rule.retain, settings.log if keep is Keep.MEMORY else None)
    if rule.last_value:
        yield "last value"


def _retained(retain: Retain, in_memory: LogSettings | None) -> str:
    bounds = []
    if retain.age_ns is not None:
        bounds.append(format_duration(retain.age_ns))
    if retain.bytes_max is not None:
        bounds.append(format_size(retain.bytes_max))
    elif in_memory is not None:
        bounds.append(format_size(in_memory.memory_journal_bytes_max))
    if retain.until is not None:
        bounds.append(f"until {retain.until.value}")
    return f"retained {' or '.join(bounds)}" if bounds else "for ever"
