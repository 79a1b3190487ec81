"""The rules of the settings, and the policy that they give a topic."""

from __future__ import annotations

import pytest

from runnel.config import Keep, Pin, Retain, Rotate, TopicRule, Until
from runnel.errors import InvalidNameError, SettingsError
from runnel.topics.policies import FixedPolicy, JournalPolicy, Policies, Policy

DAY_NS = 86_400_000_000_000
WEEK = Retain(age_ns=7 * DAY_NS)


def policies(*rules: TopicRule) -> Policies:
    return Policies(rules)


def refusal(*rules: TopicRule) -> str:
    with pytest.raises(SettingsError) as caught:
        Policies(rules)
    return str(caught.value)


# --- Which rule decides ---


def test_without_a_rule_a_topic_is_kept_on_disk_for_ever() -> None:
    assert policies().for_topic("orders") == Policy(
        keep=Keep.DISK,
        partitions=1,
        journal="main",
        rotate=Rotate(),
        retain=Retain(),
        pin=Pin(),
        last_value=False,
        rule=None,
    )


def test_the_first_matching_rule_decides() -> None:
    rules = policies(
        TopicRule(match="a/b*", partitions=2, last_value=True),
        TopicRule(match="a/*", partitions=3),
        TopicRule(match="*", partitions=4),
    )
    assert [rules.for_topic(t).partitions for t in ("a/bc", "a/c", "c")] == [2, 3, 4]
    assert rules.for_topic("a/bc").last_value
    assert rules.for_topic("a/c").rule == "a/*"


def test_keep_may_be_written_as_text() -> None:
    for keep in Keep:
        rules = policies(TopicRule(match="a/*", keep=keep.value))  # type: ignore[arg-type]
        assert rules.for_topic("a/b").keep is keep
    problem = refusal(TopicRule(match="a/*", keep="tape"))  # type: ignore[arg-type]
    assert problem == "topics[0] (match = 'a/*'): keep = 'tape' is none of none, memory, disk"


def test_topics_of_a_rule_share_one_policy_object() -> None:
    rules = policies(TopicRule(match="a/*"))
    assert rules.for_topic("a/1") is rules.for_topic("a/2")


def test_the_default_journal_of_a_rule_is_its_own() -> None:
    rules = policies(TopicRule(match="a/*"), TopicRule(match="b/*", journal="both"))
    assert rules.for_topic("a/1").journal == "a/*"
    assert rules.for_topic("b/1").journal == "both"


def test_a_journal_with_the_topic_in_its_name_belongs_to_the_topic() -> None:
    rules = policies(TopicRule(match="a/*", journal="own-{topic}"))
    assert rules.for_topic("a/1").journal == "own-a/1"


def test_braces_in_a_pattern_are_not_a_place_for_the_topic() -> None:
    assert policies(TopicRule(match="{topic}*")).for_topic("{topic}/1").journal == "{topic}*"


def test_topics_that_are_not_kept_share_the_pseudo_journal() -> None:
    rules = policies(TopicRule(match="a/*", keep=Keep.NONE), TopicRule(match="b", keep=Keep.NONE))
    assert {rules.for_topic(t).journal for t in ("a/1", "b")} == {"live"}


# --- The system's topics ---


def test_system_topics_are_not_kept_unless_a_rule_says_so() -> None:
    assert policies(TopicRule(match="*")).for_topic("!system/top").keep is Keep.NONE
    kept = policies(TopicRule(match="!system/*", retain=WEEK)).for_topic("!system/top")
    assert (kept.keep, kept.retain) == (Keep.DISK, WEEK)


def test_dead_letters_are_kept_on_disk_for_ever_and_apart_from_other_topics() -> None:
    for rules in (policies(), policies(TopicRule(match="*", journal="main", retain=WEEK))):
        dead = rules.for_topic("!dead/billing")
        assert (dead.keep, dead.retain, dead.journal) == (Keep.DISK, Retain(), "!dead")


def test_a_rule_for_system_topics_may_limit_dead_letters() -> None:
    assert policies(TopicRule(match="!dead/*", retain=WEEK)).for_topic("!dead/a").retain == WEEK
    assert policies(TopicRule(match="!*", retain=WEEK)).for_topic("!dead/a").retain == WEEK


def test_no_rule_takes_dead_letters_off_the_disk() -> None:
    rules = policies(TopicRule(match="!*", keep=Keep.MEMORY, partitions=3))
    assert rules.for_topic("!system/a").keep is Keep.MEMORY
    dead = rules.for_topic("!dead/a")
    assert (dead.keep, dead.partitions, dead.rule) == (Keep.DISK, 1, None)
    text = refusal(TopicRule(match="!dead/a*", keep=Keep.NONE))
    assert "topics[0] (match = '!dead/a*'): keep = none" in text
    assert "always kept on disk" in text


# --- Rules that are refused ---


def test_a_malformed_pattern_is_refused_with_its_rule() -> None:
    text = refusal(TopicRule(match="a"), TopicRule(match="b[c"))
    assert "topics[1].match" in text
    assert "not closed" in text


@pytest.mark.parametrize("partitions", [0, -1, 1025])
def test_the_number_of_partitions_is_bounded(partitions: int) -> None:
    text = refusal(TopicRule(match="a", partitions=partitions))
    assert f"partitions = {partitions} is not between 1 and 1024" in text
    assert Policies([TopicRule(match="a", partitions=1024)]).for_topic("a").partitions == 1024


def test_a_repeated_pattern_is_refused() -> None:
    text = refusal(TopicRule(match="a*"), TopicRule(match="b"), TopicRule(match="a*"))
    assert "topics[2] (match = 'a*') never applies: topics[0] (match = 'a*')" in text


@pytest.mark.parametrize(
    ("journal", "problem"),
    [
        ("live", "reserved"),
        ("", "empty"),
        ("a\nb", "control character"),
        ("{topic}\n", "control character"),
        ("{topic}/{topic}", "more than once"),
        ("x" * 256, "longer than 255 bytes"),
    ],
)
def test_a_journal_name_that_will_not_do_is_refused(journal: str, problem: str) -> None:
    text = refusal(TopicRule(match="a/*", journal=journal))
    assert "topics[0] (match = 'a/*'): journal" in text
    assert problem in text


def test_a_rule_whose_pattern_cannot_name_its_journal_has_to_name_one() -> None:
    assert "reserved" in refusal(TopicRule(match="live"))
    assert policies(TopicRule(match="live", journal="x")).for_topic("live").journal == "x"


@pytest.mark.parametrize(
    ("rule", "key"),
    [
        (TopicRule(match="a", keep=Keep.NONE, journal="x"), "journal = 'x'"),
        (TopicRule(match="a", keep=Keep.NONE, retain=WEEK), "retain.age = 7d"),
        (
            TopicRule(match="a", keep=Keep.NONE, rotate=Rotate(at_ns=DAY_NS // 4)),
            "rotate.at = 06:00",
        ),
        (TopicRule(match="a", keep=Keep.NONE, pin=Pin(bytes_max=1024)), "pin.bytes = 1KiB"),
    ],
)
def test_what_needs_stored_messages_is_refused_where_none_are_kept(
    rule: TopicRule, key: str
) -> None:
    assert f"{key} has no effect with keep = none" in refusal(rule)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (TopicRule(match="b", journal="j", retain=WEEK), "retain.age = 7d in the one and none"),
        (
            TopicRule(match="b", journal="j", retain=Retain(until=Until.ACKED)),
            "retain.until = acked in the one and none",
        ),
        (
            TopicRule(match="b", journal="j", rotate=Rotate(bytes_max=1 << 20)),
            "rotate.bytes = 1MiB in the one and 256MiB",
        ),
        (
            TopicRule(match="b", journal="j", pin=Pin(age_ns=None)),
            "pin.age = none in the one and 30d",
        ),
        (TopicRule(match="b", journal="j", keep=Keep.MEMORY), "keep = memory in the one and disk"),
    ],
)
def test_rules_that_share_a_journal_must_agree(other: TopicRule, difference: str) -> None:
    text = refusal(TopicRule(match="a", journal="j"), other)
    assert "topics[1] (match = 'b') and topics[0] (match = 'a') share the journal 'j'" in text
    assert difference in text


def test_rules_that_agree_may_share_a_journal_and_differ_in_the_rest() -> None:
    rules = policies(
        TopicRule(match="a", journal="j", retain=WEEK, partitions=2),
        TopicRule(match="b", journal="j", retain=WEEK, last_value=True),
        TopicRule(match="j", retain=WEEK),
    )
    assert {rules.for_topic(t).journal for t in ("a", "b", "j")} == {"j"}


def test_a_rule_that_uses_the_journal_of_topics_without_a_rule_must_agree_with_it() -> None:
    assert "the default for '*'" in refusal(TopicRule(match="a/*", journal="main", retain=WEEK))
    assert "the default for '!dead/*'" in refusal(
        TopicRule(match="a", journal="!dead", retain=WEEK)
    )
    # With a rule for everything, no topic is without a rule.
    everything = policies(TopicRule(match="*", journal="main", retain=WEEK))
    assert everything.for_topic("a").retain == WEEK
    assert policies(TopicRule(match="a/*", journal="main")).for_topic("a/1").journal == "main"


def test_rules_that_give_each_topic_its_own_journal_need_not_agree() -> None:
    rules = policies(
        TopicRule(match="a/*", journal="{topic}", retain=WEEK),
        TopicRule(match="b/*", journal="{topic}"),
    )
    assert rules.for_topic("a/1").retain == WEEK
    assert rules.for_topic("b/1").retain == Retain()


# --- Topics whose own journal would be another's ---


def test_a_topic_is_refused_if_its_own_journal_is_one_that_another_rule_keeps_differently() -> None:
    rules = policies(
        TopicRule(match="orders/*", journal="orders", retain=WEEK),
        TopicRule(match="*", journal="{topic}"),
    )
    assert rules.for_topic("orders/1").journal == "orders"
    assert rules.for_topic("order").journal == "order"
    with pytest.raises(InvalidNameError) as caught:
        rules.for_topic("orders")
    text = str(caught.value)
    assert "topic 'orders' cannot have the journal 'orders'" in text
    assert (
        "topics[0] (match = 'orders/*') uses it too, with retain.age = 7d instead of none" in text
    )


def test_it_is_refused_too_if_the_other_rule_gives_own_journals() -> None:
    rules = policies(
        TopicRule(match="a/*", journal="x-{topic}", retain=WEEK),
        TopicRule(match="*", journal="{topic}"),
    )
    for topic in ("a/1", "x-a/1"):
        with pytest.raises(InvalidNameError, match=r"retain\.age"):
            rules.for_topic(topic)
    assert rules.for_topic("x-b").journal == "x-b"


def test_no_topic_has_the_pseudo_journal_or_one_too_long_for_a_name() -> None:
    rules = policies(
        TopicRule(match="*", journal="{topic}"), TopicRule(match="!*", journal="j-{topic}")
    )
    with pytest.raises(InvalidNameError, match="'live' is reserved"):
        rules.for_topic("live")
    assert rules.for_topic("x" * 255).journal == "x" * 255
    with pytest.raises(InvalidNameError, match="longer than 255 bytes"):
        rules.for_topic("!" + "x" * 254)


# --- Topics made earlier ---


def test_a_recorded_topic_keeps_its_fixed_part_and_takes_the_rest_from_the_rules() -> None:
    rules = policies(
        TopicRule(match="a/*", partitions=8, journal="a", retain=WEEK, last_value=True)
    )
    fixed = FixedPolicy(keep=Keep.DISK, partitions=4, journal="a")
    policy = rules.for_recorded("a/1", fixed)
    assert policy.fixed == fixed
    assert (policy.retain, policy.last_value, policy.rule) == (WEEK, True, "a/*")


def test_the_journal_of_a_recorded_topic_goes_by_the_rules_that_name_it() -> None:
    rules = policies(
        TopicRule(match="a/*", journal="new"), TopicRule(match="b/*", journal="old", retain=WEEK)
    )
    old = FixedPolicy(keep=Keep.DISK, partitions=1, journal="old")
    assert rules.for_recorded("a/1", old).retain == WEEK


def test_a_journal_that_no_rule_names_any_more_loses_nothing() -> None:
    rules = policies(TopicRule(match="*", journal="new", retain=WEEK))
    assert rules.for_journal("old", keep=Keep.DISK) == JournalPolicy(keep=Keep.DISK)
    assert rules.for_journal("new", keep=Keep.DISK).retain == WEEK
    # The rule speaks of a journal on disk; one of that name in memory is not the same.
    assert rules.for_journal("new", keep=Keep.MEMORY).retain == Retain()


def test_the_journal_of_one_topic_goes_by_that_topics_rule() -> None:
    rules = policies(
        TopicRule(match="a/*", journal="{topic}", retain=WEEK), TopicRule(match="*", journal="rest")
    )
    assert rules.for_journal("a/1", keep=Keep.DISK).retain == WEEK
    assert rules.for_journal("b", keep=Keep.DISK).retain == Retain()


def test_differences_of_the_fixed_part_are_listed() -> None:
    rules = policies(TopicRule(match="a/*", partitions=8, keep=Keep.MEMORY, retain=WEEK))
    recorded = FixedPolicy(keep=Keep.DISK, partitions=4, journal="main")
    differences = rules.differences("a/1", recorded)
    assert [(d.key, d.recorded, d.now) for d in differences] == [
        ("keep", "disk", "memory"),
        ("partitions", "4", "8"),
        ("journal", "main", "a/*"),
    ]
    assert differences[1].text == (
        "topic 'a/1' stays with partitions = 4, fixed when it was made; "
        "the rule for 'a/*' would now give 8"
    )
    assert "without a rule it would now give 1" in policies().differences("a/1", recorded)[0].text


def test_a_topic_that_the_rules_still_describe_has_no_differences() -> None:
    rules = policies(TopicRule(match="a/*", partitions=8))
    assert rules.differences("a/1", rules.for_topic("a/1").fixed) == []


def test_rules_that_would_refuse_a_topic_today_do_not_stop_a_recorded_one() -> None:
    rules = policies(
        TopicRule(match="orders/*", journal="orders", retain=WEEK),
        TopicRule(match="*", journal="{topic}"),
    )
    recorded = FixedPolicy(keep=Keep.DISK, partitions=1, journal="main")
    assert rules.for_recorded("orders", recorded).journal == "main"
    assert [d.now for d in rules.differences("orders", recorded)] == ["orders"]
