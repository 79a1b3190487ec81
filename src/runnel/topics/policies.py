"""Policies: how each topic is kept, by the rules of the settings.

The first rule whose pattern matches decides. Four built-in rules follow the user's rules:

    !dead/*    on disk, in the journal `!dead`, for ever, because a dead letter still has to be dealt with
    !system/*  ephemeral, except for the last value: a new subscriber sees the latest figures
    !*         ephemeral
    *          on disk, in the journal `main`, for ever

Dead letters are always on disk: a rule for `!*` that does not keep on disk does not apply to them.

A journal has one set of files, so all its topics are rotated and retained alike. If two rules name the same journal and
disagree, the settings are refused. The rules alone do not show this if a journal's name contains `{topic}`; then a
topic is refused if another rule keeps its journal differently. Neither check depends on the order of events.

`keep`, `partitions` and `journal` are recorded when a topic is created, and stay. Everything else follows the current
rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from runnel.config import (
    Keep,
    Pin,
    Retain,
    Rotate,
    TopicRule,
    format_duration,
    format_size,
    format_time_of_day,
)
from runnel.config.settings import key_of_field
from runnel.errors import InvalidNameError, SettingsError
from runnel.topics.names import (
    DEAD_LETTER_PREFIX,
    LIVE_JOURNAL,
    Label,
    check_label,
    is_dead_letter,
    is_system,
)
from runnel.topics.patterns import Pattern

PARTITIONS_MAX: Final = 1024
MAIN_JOURNAL: Final = "main"
DEAD_LETTER_JOURNAL: Final = "!dead"
TOPIC_PLACEHOLDER: Final = "{topic}"


class FixedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a topic's policy that is recorded when the topic is created, and stays."""

    keep: Keep
    partitions: int
    journal: str


class JournalPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a policy that all topics of a journal share."""

    keep: Keep
    rotate: Rotate = Rotate()
    retain: Retain = Retain()
    pin: Pin = Pin()


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How one topic is kept. `rule` is the pattern of the user's rule that applies; None: a built-in rule."""

    keep: Keep
    partitions: int
    journal: str
    rotate: Rotate
    retain: Retain
    pin: Pin
    last_value: bool
    rule: str | None

    @property
    def fixed(self) -> FixedPolicy:
        """The part that is recorded."""
        return FixedPolicy(keep=self.keep, partitions=self.partitions, journal=self.journal)

    @property
    def of_journal(self) -> JournalPolicy:
        """The part that all topics of the journal share."""
        return JournalPolicy(keep=self.keep, rotate=self.rotate, retain=self.retain, pin=self.pin)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a topic's recorded policy that differs from what the current rules give."""

    topic: str
    key: str
    recorded: str
    now: str
    rule: str | None

    @property
    def text(self) -> str:
        """The line that is logged at start-up."""
        source = "without a rule it" if self.rule is None else f"the rule for {self.rule!r}"
        return (
            f"topic {self.topic!r} stays with {self.key} = {self.recorded}, "
            f"fixed when it was made; {source} would now give {self.now}"
        )


class _Rule:
    """A rule with its pattern parsed and its defaults filled in."""

    __slots__ = ("name", "pattern", "policy", "template")

    def __init__(self, name: str, pattern: Pattern, policy: Policy, template: str | None) -> None:
        self.name: Final = name  # as errors name it
        self.pattern: Final = pattern
        # One object for all topics of the rule, unless each topic has its own journal.
        self.policy: Final = policy
        self.template: Final = template

    def policy_of(self, topic: str) -> Policy:
        if self.template is None:
            return self.policy
        journal = self.template.replace(TOPIC_PLACEHOLDER, topic)
        return msgspec.structs.replace(self.policy, journal=journal)

    def topic_of(self, journal: str) -> str | None:
        """The topic that would get this journal from the template."""
        if self.template is None:
            return None
        before, _, behind = self.template.partition(TOPIC_PLACEHOLDER)
        if not (journal.startswith(before) and journal.endswith(behind)):
            return None
        return journal[len(before) : len(journal) - len(behind)] or None

    def leaves_nothing_of(self, later: _Rule) -> bool:
        """Whether this rule surely decides every topic of `later`. Recognises only simple cases."""
        prefix = self.pattern.prefix
        return (
            self.pattern.text == prefix + "*"
            and later.pattern.prefix.startswith(prefix)
            and is_system(prefix) == is_system(later.pattern.prefix)
            and (self.policy.keep is Keep.DISK or not is_dead_letter(later.pattern.prefix))
        )


class Policies:
    """The checked rules. They give each topic and each journal its policy."""

    __slots__ = ("_rules",)

    def __init__(
        self, rules: Sequence[TopicRule] = (), *, partitions_max: int = PARTITIONS_MAX
    ) -> None:
        own = [_read(index, rule, partitions_max) for index, rule in enumerate(rules)]
        _refuse_repeated_patterns(own)
        _refuse_disagreement(
            [*own, *(ours for ours in _OURS if not any(r.leaves_nothing_of(ours) for r in own))]
        )
        self._rules = (*own, *_OURS)

    def follow(self, other: Policies) -> None:
        """Take over the rules of `other`, so that all holders of this object see them."""
        self._rules = other._rules

    def for_topic(self, topic: str) -> Policy:
        """The policy of a new topic. InvalidNameError if the topic cannot have the journal that its rule gives it."""
        rule = self._rule_of(topic)
        policy = rule.policy_of(topic)
        if rule.template is not None:
            self._check_own_journal(topic, rule, policy)
        return policy

    def for_recorded(self, topic: str, fixed: FixedPolicy) -> Policy:
        """The policy of an existing topic: the recorded part, and the rest by the current rules."""
        rule = self._rule_of(topic)
        of_journal = self.for_journal(fixed.journal, keep=fixed.keep)
        return Policy(
            keep=fixed.keep,
            partitions=fixed.partitions,
            journal=fixed.journal,
            rotate=of_journal.rotate,
            retain=of_journal.retain,
            pin=of_journal.pin,
            last_value=rule.policy.last_value,
            rule=rule.policy.rule,
        )

    def for_journal(self, journal: str, *, keep: Keep) -> JournalPolicy:
        """How a journal is rotated and retained.

        A journal that no rule names any more keeps its messages: removing a rule from the settings is no order to
        remove messages.
        """
        rule = next((r for r in self._users_of(journal) if r.policy.keep is keep), None)
        return JournalPolicy(keep=keep) if rule is None else rule.policy.of_journal

    def keep_of_journal(self, journal: str) -> Keep:
        """Where the topics of a journal are kept. A journal that no rule names any more lies on disk."""
        rule = next(self._users_of(journal), None)
        return Keep.DISK if rule is None else rule.policy.keep

    def topic_of_journal(self, journal: str) -> str | None:
        """The only topic that can use this journal, whether it exists or not. None: topics share the journal."""
        users = list(self._users_of(journal))
        return users[0].topic_of(journal) if len(users) == 1 else None

    def may_split(self, journal: str) -> bool:
        """Whether a new journal may have several shards. One that a `{topic}` template names has a single one."""
        return all(rule.template is None for rule in self._users_of(journal))

    def differences(self, topic: str, recorded: FixedPolicy) -> list[Difference]:
        """The differences between a topic's recorded part and what the current rules would give it."""
        policy = self._rule_of(topic).policy_of(topic)
        return [
            Difference(topic=topic, key=key, recorded=was, now=now, rule=policy.rule)
            for key, was, now in _differing(recorded, policy.fixed)
        ]

    def _rule_of(self, topic: str) -> _Rule:
        # A plain loop, because one batch may create sixty thousand topics.
        is_dead = is_dead_letter(topic)
        for rule in self._rules:
            if rule.pattern.matches(topic) and not (is_dead and rule.policy.keep is not Keep.DISK):
                return rule
        raise AssertionError("our own rules match every name")

    def _users_of(self, journal: str) -> Iterator[_Rule]:
        """The rules that give this journal to their topics, or would give it to a topic that may exist."""
        for rule in self._rules:
            if rule.template is None:
                if rule.policy.journal == journal:
                    yield rule
            elif (topic := rule.topic_of(journal)) is not None and self._rule_of(topic) is rule:
                yield rule

    def _check_own_journal(self, topic: str, rule: _Rule, policy: Policy) -> None:
        try:
            check_label(Label.JOURNAL, policy.journal)
        except InvalidNameError as error:
            raise InvalidNameError(
                f"topic {topic!r} cannot have the journal that {rule.name} gives it: {error}"
            ) from error
        for other in self._users_of(policy.journal):
            for key, here, there in _differing(policy.of_journal, other.policy.of_journal):
                raise InvalidNameError(
                    f"topic {topic!r} cannot have the journal {policy.journal!r} that {rule.name} "
                    f"gives it: {other.name} uses it too, with {key} = {there} instead of {here}"
                )


def _read(index: int, rule: TopicRule, partitions_max: int) -> _Rule:
    name = f"topics[{index}] (match = {rule.match!r})"
    try:
        pattern = Pattern(rule.match)
    except InvalidNameError as error:
        raise SettingsError(f"topics[{index}].match: {error}") from error
    if not 1 <= rule.partitions <= partitions_max:
        raise SettingsError(
            f"{name}: partitions = {rule.partitions} is not between 1 and {partitions_max}"
        )
    try:
        keep = Keep(rule.keep)  # a program may have given it as text
    except ValueError:
        raise SettingsError(f"{name}: keep = {rule.keep!r} is none of {', '.join(Keep)}") from None
    if pattern.prefix.startswith(DEAD_LETTER_PREFIX) and keep is not Keep.DISK:
        raise SettingsError(
            f"{name}: keep = {keep} is not possible: dead letters are always kept on disk"
        )
    if keep is Keep.NONE:
        _refuse_keys_of_kept_topics(name, rule)
        journal, template = LIVE_JOURNAL, None
    else:
        # A rule's default journal is its pattern taken literally, even if it contains "{topic}".
        journal = rule.match if rule.journal is None else rule.journal
        template = rule.journal if TOPIC_PLACEHOLDER in journal else None
        _check_journal(name, journal, template)
    policy = Policy(
        keep=keep,
        partitions=rule.partitions,
        journal=journal,
        rotate=rule.rotate,
        retain=rule.retain,
        pin=rule.pin,
        last_value=rule.last_value,
        rule=rule.match,
    )
    return _Rule(name, pattern, policy, template)


def _check_journal(name: str, journal: str, template: str | None) -> None:
    if template is not None and template.count(TOPIC_PLACEHOLDER) > 1:
        raise SettingsError(f"{name}: journal = {journal!r} has {TOPIC_PLACEHOLDER} more than once")
    try:
        # Checks the shortest possible topic; for_topic checks the name for each real topic.
        check_label(
            Label.JOURNAL, journal if template is None else journal.replace(TOPIC_PLACEHOLDER, "t")
        )
    except InvalidNameError as error:
        raise SettingsError(f"{name}: journal = {journal!r}: {error}") from error


def _refuse_keys_of_kept_topics(name: str, rule: TopicRule) -> None:
    if rule.journal is not None:
        raise SettingsError(
            f"{name}: journal = {rule.journal!r} has no effect with keep = none: nothing is stored"
        )
    given = JournalPolicy(keep=Keep.NONE, rotate=rule.rotate, retain=rule.retain, pin=rule.pin)
    for key, value, _ in _differing(given, JournalPolicy(keep=Keep.NONE)):
        raise SettingsError(
            f"{name}: {key} = {value} has no effect with keep = none: nothing is stored"
        )


def _refuse_repeated_patterns(rules: Sequence[_Rule]) -> None:
    first: dict[str, _Rule] = {}
    for rule in rules:
        earlier = first.setdefault(rule.pattern.text, rule)
        if earlier is not rule:
            raise SettingsError(f"{rule.name} never applies: {earlier.name} has the same pattern")


def _refuse_disagreement(rules: Sequence[_Rule]) -> None:
    first: dict[str, _Rule] = {}
    for rule in rules:
        if rule.template is not None:
            continue  # each of its topics has its own journal, which for_topic checks
        earlier = first.setdefault(rule.policy.journal, rule)
        for key, here, there in _differing(rule.policy.of_journal, earlier.policy.of_journal):
            raise SettingsError(
                f"{rule.name} and {earlier.name} share the journal {rule.policy.journal!r}, "
                f"but {key} = {here} in the one and {there} in the other"
            )


def _differing(one: msgspec.Struct, other: msgspec.Struct) -> Iterator[tuple[str, str, str]]:
    """Each key whose values differ between two structs of one kind, with both values as the settings write them."""
    for field in one.__struct_fields__:
        key, left, right = key_of_field(field), getattr(one, field), getattr(other, field)
        if isinstance(left, msgspec.Struct):
            for inner, left_text, right_text in _differing(left, right):
                yield f"{key}.{inner}", left_text, right_text
        elif left != right:
            yield key, _written(field, left), _written(field, right)


def _written(field: str, value: str | int | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return str(value)
    if field == "at_ns":
        return format_time_of_day(value)
    if field == "bytes_max":
        return format_size(value)
    return format_duration(value) if field.endswith("_ns") else str(value)


def _ours(match: str, keep: Keep, journal: str, *, last_value: bool = False) -> _Rule:
    policy = Policy(
        keep=keep,
        partitions=1,
        journal=journal,
        rotate=Rotate(),
        retain=Retain(),
        pin=Pin(),
        last_value=last_value,
        rule=None,
    )
    return _Rule(f"the default for {match!r}", Pattern(match), policy, None)


_OURS: Final = (
    _ours(DEAD_LETTER_PREFIX + "*", Keep.DISK, DEAD_LETTER_JOURNAL),
    _ours("!system/*", Keep.NONE, LIVE_JOURNAL, last_value=True),
    _ours("!*", Keep.NONE, LIVE_JOURNAL),
    _ours("*", Keep.DISK, MAIN_JOURNAL),
)
