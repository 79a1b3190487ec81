"""How a topic is kept: the rules of the settings, in order, and the policy that they give a topic.

The first rule whose pattern matches decides. Behind the user's rules stand four of our own:

    !dead/*    on disk, in the journal `!dead`, for ever: a dead letter is what somebody still owes
    !system/*  not kept, but for the last value: whoever begins to watch sees the latest figures
    !*         not kept
    *          on disk, in the journal `main`, for ever

Dead letters are always on disk: a rule for `!*` that does not keep on disk is passed over for them.

A journal has one set of files, so everything that goes into it is rotated and retained alike. Where
two rules name the same journal and disagree, the settings are refused. With `{topic}` in a
journal's name that cannot be seen from the rules alone; then it is the topic that is refused, whose
journal would be one that another rule keeps differently. Neither depends on which came first.

`keep`, `partitions` and `journal` are recorded when a topic is made and stay. Everything else
follows the rules as they are now.
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
    """What is recorded when a topic is made, and stays."""

    keep: Keep
    partitions: int
    journal: str


class JournalPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What all topics of a journal have in common."""

    keep: Keep
    rotate: Rotate = Rotate()
    retain: Retain = Retain()
    pin: Pin = Pin()


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How one topic is kept. `rule` is the pattern of the rule that said so, None without one."""

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
        """The part to record."""
        return FixedPolicy(keep=self.keep, partitions=self.partitions, journal=self.journal)

    @property
    def of_journal(self) -> JournalPolicy:
        """The part that it shares with all topics of its journal."""
        return JournalPolicy(keep=self.keep, rotate=self.rotate, retain=self.retain, pin=self.pin)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a topic's recorded policy that the rules would choose otherwise today."""

    topic: str
    key: str
    recorded: str
    now: str
    rule: str | None

    @property
    def text(self) -> str:
        """A line of the list at start-up."""
        source = "without a rule it" if self.rule is None else f"the rule for {self.rule!r}"
        return (
            f"topic {self.topic!r} stays with {self.key} = {self.recorded}, "
            f"fixed when it was made; {source} would now give {self.now}"
        )


class _Rule:
    """A rule with its pattern read and its defaults filled in."""

    __slots__ = ("name", "pattern", "policy", "template")

    def __init__(self, name: str, pattern: Pattern, policy: Policy, template: str | None) -> None:
        self.name: Final = name  # as errors call it
        self.pattern: Final = pattern
        # One object for all topics of the rule, unless each has its own journal.
        self.policy: Final = policy
        self.template: Final = template

    def policy_of(self, topic: str) -> Policy:
        if self.template is None:
            return self.policy
        journal = self.template.replace(TOPIC_PLACEHOLDER, topic)
        return msgspec.structs.replace(self.policy, journal=journal)

    def topic_of(self, journal: str) -> str | None:
        """The topic to which the template would give this journal."""
        if self.template is None:
            return None
        before, _, behind = self.template.partition(TOPIC_PLACEHOLDER)
        if not (journal.startswith(before) and journal.endswith(behind)):
            return None
        return journal[len(before) : len(journal) - len(behind)] or None

    def leaves_nothing_of(self, later: _Rule) -> bool:
        """Whether every topic of `later` is surely decided here. Sees only the plain cases."""
        prefix = self.pattern.prefix
        return (
            self.pattern.text == prefix + "*"
            and later.pattern.prefix.startswith(prefix)
            and is_system(prefix) == is_system(later.pattern.prefix)
            and (self.policy.keep is Keep.DISK or not is_dead_letter(later.pattern.prefix))
        )


class Policies:
    """The rules, checked: what each topic's policy is, and each journal's."""

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
        """Answer as the other does from now on, for everybody who holds this one."""
        self._rules = other._rules

    def for_topic(self, topic: str) -> Policy:
        """The policy of a new topic. InvalidNameError: its journal's name would not do."""
        rule = self._rule_of(topic)
        policy = rule.policy_of(topic)
        if rule.template is not None:
            self._check_own_journal(topic, rule, policy)
        return policy

    def for_recorded(self, topic: str, fixed: FixedPolicy) -> Policy:
        """The policy of a topic made earlier: as recorded, and the rest as the rules say now."""
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

        One that no rule speaks of any more keeps what it has: a rule that was taken out of the
        settings is no order to remove its messages.
        """
        rule = next((r for r in self._users_of(journal) if r.policy.keep is keep), None)
        return JournalPolicy(keep=keep) if rule is None else rule.policy.of_journal

    def topic_of_journal(self, journal: str) -> str | None:
        """The topic that has this journal to itself, whether it exists or not. None: topics share it."""
        users = list(self._users_of(journal))
        return users[0].topic_of(journal) if len(users) == 1 else None

    def differences(self, topic: str, recorded: FixedPolicy) -> list[Difference]:
        """Where a topic's recorded part is not what the rules would give it now."""
        policy = self._rule_of(topic).policy_of(topic)
        return [
            Difference(topic=topic, key=key, recorded=was, now=now, rule=policy.rule)
            for key, was, now in _differing(recorded, policy.fixed)
        ]

    def _rule_of(self, topic: str) -> _Rule:
        # A plain loop: a batch may make sixty thousand topics at once.
        is_dead = is_dead_letter(topic)
        for rule in self._rules:
            if rule.pattern.matches(topic) and not (is_dead and rule.policy.keep is not Keep.DISK):
                return rule
        raise AssertionError("our own rules match every name")

    def _users_of(self, journal: str) -> Iterator[_Rule]:
        """The rules that give this journal to their topics, or to one that may exist."""
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
        keep = Keep(rule.keep)  # a program may have written it as text
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
        # A rule's default journal is its pattern as it stands, even one with "{topic}" in it.
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
        # The shortest topic stands for all; for_topic checks the name that a real one gives.
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
            continue  # its topics have journals of their own; for_topic looks after those
        earlier = first.setdefault(rule.policy.journal, rule)
        for key, here, there in _differing(rule.policy.of_journal, earlier.policy.of_journal):
            raise SettingsError(
                f"{rule.name} and {earlier.name} share the journal {rule.policy.journal!r}, "
                f"but {key} = {here} in the one and {there} in the other"
            )


def _differing(one: msgspec.Struct, other: msgspec.Struct) -> Iterator[tuple[str, str, str]]:
    """Each key with two values, of structs of the same kind, as the settings write them."""
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
