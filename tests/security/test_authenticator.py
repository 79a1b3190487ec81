"""The authenticator: who is let in, for how long, and what becomes of those inside when the file changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runnel.config import Authentication, SecuritySettings, Settings
from runnel.errors import (
    ClosedError,
    LimitExceededError,
    RunnelError,
    SettingsError,
    UnauthenticatedError,
)
from runnel.security.authenticator import Authenticator, tokens_path
from runnel.security.rights import Right
from tests.fakes.clock import NS_PER_SECOND, VirtualClock
from tests.protocols.native.talker import in_loop, turn
from tests.security.keyring import Keyring


@pytest.fixture
def keys(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


@asynccontextmanager
async def watching(keys: Keyring, clock: VirtualClock) -> AsyncIterator[Authenticator]:
    authenticator = Authenticator.open(keys.settings(), clock)
    authenticator.start()
    await turn()
    try:
        yield authenticator
    finally:
        await authenticator.close()


def opened(keys: Keyring, connections_max: int = 1000) -> Authenticator:
    return Authenticator.open(keys.settings(connections_max=connections_max), VirtualClock())


def test_without_authentication_everybody_may_do_everything() -> None:
    authenticator = Authenticator.open(Settings(), VirtualClock())
    assert not authenticator.asks
    with authenticator.admit(None) as given:
        assert (given.rights, given.name) == (None, "")
    ends: list[RunnelError] = []
    given.on_revoked(ends.append)
    given.leave()
    with authenticator.admit("whatever"):
        pass


def test_a_token_gives_its_rights(keys: Keyring) -> None:
    text = keys.add("gateway", "publish:a/*")
    authenticator = opened(keys)
    assert authenticator.asks
    with authenticator.admit(text) as given:
        assert given.name == "gateway"
        assert given.rights is not None
        assert given.rights.allows(Right.PUBLISH, "a/1")
        assert not given.rights.allows(Right.READ, "a/1")


def test_none_and_wrong_ones_are_refused_with_what_would_help(keys: Keyring) -> None:
    text = keys.add("gateway", "publish:a/*")
    authenticator = opened(keys)
    with pytest.raises(UnauthenticatedError, match=r"none was shown.*runnel token add"):
        authenticator.admit(None)
    for wrong in ("", "x", text[:-1], text + "x"):
        with pytest.raises(UnauthenticatedError, match="not known here") as refused:
            authenticator.admit(wrong)
        assert not wrong or wrong not in str(refused.value).split()


async def refusal(authenticator: Authenticator, clock: VirtualClock, token: str | None) -> float:
    """The seconds that a client with this token waits for its answer."""
    with pytest.raises(UnauthenticatedError) as refused:
        authenticator.admit(token)
    waiting = asyncio.ensure_future(authenticator.penalty(refused.value, "192.0.2.1:5000"))
    begin_ns = clock.monotonic_ns()
    await turn()
    while not waiting.done():
        clock.advance(NS_PER_SECOND // 20)
        await turn()
    return (clock.monotonic_ns() - begin_ns) / NS_PER_SECOND


@in_loop
async def test_only_a_token_that_was_shown_is_punished(tmp_path: Path) -> None:
    clock = VirtualClock()
    authenticator = Authenticator.open(Keyring(tmp_path).settings(), clock)
    shown = (None, None, "wrong", None, "wrong", None)
    waits = [await refusal(authenticator, clock, token) for token in shown]
    assert waits == pytest.approx([0, 0, 0.1, 0, 0.2, 0])
    assert authenticator.refused_count == 6


def test_a_token_made_later_is_known_at_once(
    keys: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    authenticator = opened(keys)
    assert "no client can connect: there is no token yet; `runnel token add" in caplog.text
    text = keys.add("late", "read:*")
    with authenticator.admit(text) as given:
        assert given.name == "late"
    assert authenticator.token_count == 1


def test_a_revoked_token_opens_nothing_any_more(keys: Keyring) -> None:
    text = keys.add("gateway", "publish:a/*")
    authenticator = opened(keys)
    authenticator.admit(text).leave()
    keys.revoke("gateway")
    with pytest.raises(UnauthenticatedError):
        authenticator.admit(text)
    other = keys.add("gateway", "publish:a/*")  # of the same name, and yet another
    with pytest.raises(UnauthenticatedError):
        authenticator.admit(text)
    authenticator.admit(other)


@in_loop
async def test_whoever_is_inside_with_a_revoked_token_is_told_within_a_moment(
    tmp_path: Path,
) -> None:
    keys, clock = Keyring(tmp_path), VirtualClock()
    texts = {name: keys.add(name, "read:*") for name in ("a", "b")}
    async with watching(keys, clock) as authenticator:
        ends: dict[str, RunnelError] = {}
        for name, text in texts.items():
            client = authenticator.admit(text)
            client.on_revoked(lambda error, name=name: ends.update({name: error}))  # type: ignore[misc]
        left = authenticator.admit(texts["a"])
        left.on_revoked(lambda error: ends.update(left=error))
        left.leave()
        keys.revoke("a")
        clock.advance(NS_PER_SECOND // 4)
        await turn()
        assert ends.keys() == {"a"}
        assert isinstance(ends["a"], UnauthenticatedError)
        assert str(ends["a"]) == "token 'a' was revoked"
        clock.advance(NS_PER_SECOND)
        await turn()
        assert ends.keys() == {"a"}


@in_loop
async def test_whoever_is_inside_with_a_changed_token_is_told_to_come_again(tmp_path: Path) -> None:
    keys, clock = Keyring(tmp_path), VirtualClock()
    text = keys.add("a", "read:*")
    async with watching(keys, clock) as authenticator:
        ends: list[RunnelError] = []
        authenticator.admit(text).on_revoked(ends.append)
        keys.change("a", "publish:*")
        clock.advance(NS_PER_SECOND // 4)
        await turn()
        assert [type(end) for end in ends] == [ClosedError]
        assert str(ends[0]) == "the rights of token 'a' were changed; connect again"
        given = authenticator.admit(text)
        assert given.rights is not None
        assert not given.rights.allows(Right.READ, "x")
        assert given.rights.allows(Right.PUBLISH, "x")


def test_a_pass_that_is_asked_after_its_end_tells_at_once(keys: Keyring) -> None:
    text = keys.add("a", "read:*")
    authenticator = opened(keys)
    given = authenticator.admit(text)
    keys.revoke("a")
    with pytest.raises(UnauthenticatedError):
        authenticator.admit(text)
    ends: list[RunnelError] = []
    given.on_revoked(ends.append)
    assert len(ends) == 1


def test_one_that_fails_to_end_keeps_no_other_inside(
    keys: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    text = keys.add("a", "read:*")
    authenticator = opened(keys)
    ends: list[RunnelError] = []

    def fail(error: RunnelError) -> None:
        raise ZeroDivisionError

    for _ in range(3):
        authenticator.admit(text).on_revoked(fail)
        authenticator.admit(text).on_revoked(ends.append)
    keys.revoke("a")
    with pytest.raises(UnauthenticatedError):
        authenticator.admit(text)
    assert len(ends) == 3
    assert "a connection could not be closed after its token" in caplog.text


def test_a_token_has_so_many_connections_and_no_more(keys: Keyring) -> None:
    usual, few = keys.add("usual", "read:*"), keys.add("few", "read:*", connections_max=1)
    authenticator = opened(keys, connections_max=2)
    first, _ = authenticator.admit(usual), authenticator.admit(usual)
    with pytest.raises(
        LimitExceededError, match="token 'usual' has 2 connections or calls under way"
    ):
        authenticator.admit(usual)
    authenticator.admit(few)  # one token's are no other's
    with pytest.raises(LimitExceededError, match="token 'few' has 1 connection"):
        authenticator.admit(few)
    first.leave()
    first.leave()  # again: nothing
    authenticator.admit(usual)
    with pytest.raises(LimitExceededError):
        authenticator.admit(usual)


def test_a_file_that_cannot_be_read_keeps_what_was_known(
    keys: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    text = keys.add("a", "read:*")
    authenticator = opened(keys)
    good = keys.file.path.read_bytes()
    keys.file.path.write_bytes(b"{")
    for _ in range(3):
        authenticator.admit(text)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 1  # not on every look
    assert "those known so far stay valid" in lines[0]
    assert str(keys.file.path) in lines[0]
    keys.file.path.write_bytes(good)
    keys.revoke("a")
    with pytest.raises(UnauthenticatedError):
        authenticator.admit(text)


def test_a_file_that_is_gone_has_no_tokens(keys: Keyring) -> None:
    text = keys.add("a", "read:*")
    authenticator = opened(keys)
    keys.file.path.unlink()
    with pytest.raises(UnauthenticatedError):
        authenticator.admit(text)


def test_a_broker_does_not_start_with_a_file_that_cannot_be_read(keys: Keyring) -> None:
    keys.file.path.write_bytes(b"{")
    with pytest.raises(SettingsError, match="is not a file of tokens"):
        opened(keys)


def test_a_file_that_others_can_read_is_reported(
    keys: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    keys.add("a", "read:*")
    opened(keys)
    assert not caplog.records
    keys.file.path.chmod(0o640)
    opened(keys)
    assert "can be read by others; chmod 600" in caplog.text


def test_the_file_is_in_the_data_directory_unless_the_settings_name_another() -> None:
    assert tokens_path(Settings(data="d")) == Path("d/tokens.json")
    named = SecuritySettings(tokens_file="/etc/runnel/tokens.json")
    assert tokens_path(Settings(data="memory:", security=named)) == Path("/etc/runnel/tokens.json")
    in_memory = SecuritySettings(authentication=Authentication.TOKEN)
    with pytest.raises(SettingsError, match=r"set security\.tokens_file as well"):
        Authenticator.open(Settings(data="memory:", security=in_memory), VirtualClock())
