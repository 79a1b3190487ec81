"""Rights: how they are written, what they allow, and that patterns cannot be used to get round them."""

from __future__ import annotations

import pytest

from runnel.errors import ClientFault, ForbiddenError, LimitExceededError
from runnel.security.rights import PATTERNS_MAX, Grant, Right, Rights


def rights(*grants: str) -> Rights:
    return Rights("tester", map(Grant.parse, grants))


def test_a_right_is_a_word_and_a_pattern() -> None:
    grant = Grant.parse("publish:sensors/*")
    assert (grant.right, grant.pattern) == (Right.PUBLISH, "sensors/*")
    assert str(grant) == "publish:sensors/*"
    assert Grant.parse("read:a:b").pattern == "a:b"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("publish", "is not a right: RIGHT:PATTERN"),
        ("write:a", "one of publish, read, consume, admin"),
        ("PUBLISH:a", "is not a right"),
        (":a", "is not a right"),
        ("publish:", "the pattern is empty"),
        ("publish:a[", "a set that is not closed"),
        ("publish:a\nb", "control character"),
        ("publish:" + "a" * 256, "longer than 255 bytes"),
    ],
)
def test_what_is_no_right_is_refused_with_what_would_be_one(text: str, problem: str) -> None:
    with pytest.raises(ClientFault) as refused:
        Grant.parse(text)
    assert problem in str(refused.value)


def test_each_right_is_for_itself() -> None:
    mine = rights("publish:a/*", "read:b/*")
    assert mine.allows(Right.PUBLISH, "a/1")
    assert not mine.allows(Right.READ, "a/1")
    assert not mine.allows(Right.PUBLISH, "b/1")
    assert mine.allows(Right.READ, "b/1")
    assert not mine.allows(Right.ADMIN, "a/1")
    assert (mine.has_any(Right.READ), mine.has_any(Right.CONSUME)) == (True, False)
    assert mine.sees("a/1")
    assert mine.sees("b/1")
    assert not mine.sees("c/1")


def test_answers_stay_the_same_when_they_are_remembered_and_when_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("runnel.security.rights._TOPICS_CACHED_MAX", 3)
    monkeypatch.setattr("runnel.security.rights._PATTERNS_CACHED_MAX", 3)
    mine = rights("publish:a/*")
    for _ in range(3):
        for number in range(10):
            assert mine.allows(Right.PUBLISH, f"a/{number}")
            assert not mine.allows(Right.PUBLISH, f"b/{number}")
            assert mine.covers(Right.PUBLISH, f"a/{number}*")
            assert not mine.covers(Right.PUBLISH, f"?/{number}*")


def test_system_topics_need_a_right_that_names_them() -> None:
    everything = rights("publish:*", "read:*", "consume:*", "admin:*")
    assert not everything.sees("!dead/billing")
    assert not everything.covers(Right.READ, "!*")
    assert rights("read:!dead/*").allows(Right.READ, "!dead/billing")


def test_of_a_batch_the_first_topic_that_is_not_allowed_is_named() -> None:
    mine = rights("publish:a/*")
    mine.check_all(Right.PUBLISH, ["a/1", "a/2", "a/1"])
    with pytest.raises(
        ForbiddenError, match="token 'tester' has no right to publish for topic 'b/1'"
    ):
        mine.check_all(Right.PUBLISH, ["a/1", "b/1", "b/2"])


def test_every_pattern_has_to_be_covered_by_one_right() -> None:
    mine = rights("read:a/*", "read:b/*")
    mine.check_patterns(Right.READ, ["a/*", "b/x"])
    for tricky in ("*", "[ab]/*", "?/*", "a*", "a/*b/../*[!a]"):
        if tricky.startswith("a/"):
            mine.check_patterns(Right.READ, [tricky])  # dots and slashes are but letters
            continue
        with pytest.raises(ForbiddenError):
            mine.check_patterns(Right.READ, ["a/*", tricky])


def test_patterns_beyond_what_can_be_compared_are_refused() -> None:
    mine = rights("read:a/*")
    mine.check_patterns(Right.READ, ["a/*"] * (PATTERNS_MAX + 1))  # the same again costs nothing
    with pytest.raises(LimitExceededError, match="at most 1024"):
        mine.check_patterns(Right.READ, [f"a/{number}/*" for number in range(PATTERNS_MAX + 1)])
