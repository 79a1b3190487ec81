"""Rules that rename replayed topics, as `sensors/*` to `replayed/sensors/*`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from runnel.errors import ClientFault, InvalidNameError
from runnel.topics.names import SYSTEM_MARK, check_text, check_topic

_STAR: Final = "*"
_RIGHT: Final = "write FROM=TO, as sensors/a=copies/a or 'sensors/*=replayed/sensors/*'"


class RenameRule(msgspec.Struct, frozen=True):
    """One rule. `*` stands for any run of characters, and in `to` for the same run. Other characters are literal."""

    since: str
    to: str

    def __str__(self) -> str:
        return f"{self.since}={self.to}"

    def apply(self, topic: str) -> str | None:
        """The new name; None if the rule does not match the topic."""
        before, star, behind = self.since.partition(_STAR)
        if not star:
            return self.to if topic == self.since else None
        # As with patterns, only a literal `!` matches system topics.
        if topic.startswith(SYSTEM_MARK) and not before.startswith(SYSTEM_MARK):
            return None
        if (
            len(topic) < len(before) + len(behind)
            or not topic.startswith(before)
            or not topic.endswith(behind)
        ):
            return None
        return self.to.replace(_STAR, topic[len(before) : len(topic) - len(behind)])


class RenameRules(msgspec.Struct, frozen=True):
    """All rules. The first rule that matches a topic decides; a topic without one keeps its name."""

    rules: tuple[RenameRule, ...] = ()

    @classmethod
    def make(cls, rules: Mapping[str, str] | Iterable[str]) -> RenameRules:
        """Make rules from names and their new names, or from texts `FROM=TO`."""
        pairs = rules.items() if isinstance(rules, Mapping) else map(_split, rules)
        return cls(tuple(_checked(RenameRule(since, to)) for since, to in pairs))

    def of(self, topic: str) -> str:
        for rule in self.rules:
            renamed = rule.apply(topic)
            if renamed is not None:
                try:
                    check_topic(renamed)
                except InvalidNameError as error:
                    raise ClientFault(
                        f"rename {rule}: {topic!r} cannot be renamed: {error}"
                    ) from None
                return renamed
        return topic


def _split(text: str) -> tuple[str, str]:
    if text.count("=") != 1:
        raise ClientFault(
            f"rename {text!r}: {_RIGHT}; names that hold a = can be renamed from Python alone"
        )
    since, _, to = text.partition("=")
    return since, to


def _checked(rule: RenameRule) -> RenameRule:
    try:
        check_text("topic name", rule.since)
        check_text("new name", rule.to)
    except InvalidNameError as error:
        raise ClientFault(f"rename {str(rule)!r}: {error}; {_RIGHT}") from None
    for text in (rule.since, rule.to):
        if text.count(_STAR) > 1:
            raise ClientFault(f"rename {str(rule)!r}: {text!r} has more than one *; {_RIGHT}")
    if _STAR in rule.to and _STAR not in rule.since:
        raise ClientFault(
            f"rename {str(rule)!r}: {rule.to!r} has a * for which {rule.since!r} has nothing; {_RIGHT}"
        )
    return rule
