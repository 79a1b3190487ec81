"""Tokens: made, found by their secret, and kept in a file as hashes."""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
import threading
from pathlib import Path

import pytest

from runnel.errors import ClientFault, SettingsError
from runnel.security.rights import Grant
from runnel.security.tokens import Token, TokenFile, find, new_token

GRANTS = [Grant.parse("publish:a/*")]


def made(name: str = "gateway") -> tuple[Token, str]:
    return new_token(name, GRANTS, now_ns=7)


def test_a_token_is_found_by_its_text_alone() -> None:
    (one, text), (other, _) = made("one"), made("other")
    tokens = {one.id: one, other.id: other}
    assert find(tokens, text) is one
    head, _, secret = text.rpartition("_" + text.split("_", 2)[2])
    assert secret == ""
    for wrong in (
        text[:-1],
        text + "x",
        text.upper(),
        head,
        text.replace(one.id, other.id),
        text.removeprefix("runnel_"),
        "",
        "runnel_",
        "runnel__",
        "runnel_\ud800_x",
        "x" * 1_000_000,
        f"runnel_{one.id}_{one.sha256}",
    ):
        assert find(tokens, wrong) is None


def test_the_entry_has_a_hash_and_not_the_secret() -> None:
    token, text = made()
    secret = text.split("_", 2)[2]
    assert token.sha256 == hashlib.sha256(secret.encode()).hexdigest()
    assert secret not in repr(token)
    assert token.sha256 not in repr(token)
    assert made()[1] != text
    assert len(secret) >= 43  # 256 bits


def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def noted(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", noted)
    token, text = made()
    assert find({token.id: token}, text) is token
    assert find({}, text) is None  # also where there is nothing to compare it with
    assert [len(one) == len(other) == 64 for one, other in compared] == [True, True]


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\nb", "ä", "a/b", "a" * 65])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(ClientFault, match="cannot be a token's name"):
        made(name)


def test_a_token_that_could_do_nothing_is_not_made() -> None:
    with pytest.raises(ClientFault, match="would be allowed nothing"):
        new_token("a", [], now_ns=0)
    with pytest.raises(ClientFault, match="0 connections would be none"):
        new_token("a", GRANTS, now_ns=0, connections_max=0)


def test_the_file_keeps_entries_and_is_its_owners_alone(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "made" / "tokens.json")
    assert file.read() == ()
    token, text = made()
    with file.changing() as tokens:
        tokens.append(token)
    assert file.read() == (token,)
    assert file.is_private()
    assert {stat.S_IMODE(path.stat().st_mode) for path in file.path.parent.iterdir()} == {0o600}
    assert text.split("_", 2)[2] not in file.path.read_text()
    file.path.chmod(0o644)
    assert not file.is_private()
    with file.changing() as tokens:
        tokens.clear()
    assert file.is_private()  # what is written anew is private again


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    token, _ = made()
    with file.changing() as tokens:
        tokens.append(token)
    before = file.stamp()
    with pytest.raises(ClientFault, match="there twice"), file.changing() as tokens:
        tokens.append(token)
    assert (file.read(), file.stamp()) == ((token,), before)


def test_a_broker_that_looks_never_sees_half_a_file(tmp_path: Path) -> None:
    """Many change it at a time: every change is there in the end, and every look finds a whole file."""
    file = TokenFile(tmp_path / "tokens.json")
    seen: list[int] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.append(len(file.read()))

    def change(writer: int) -> None:
        for number in range(10):
            with TokenFile(file.path).changing() as tokens:
                tokens.append(made(f"{writer}.{number}")[0])

    looking = threading.Thread(target=look)
    changing = [threading.Thread(target=change, args=(writer,)) for writer in range(4)]
    for thread in (looking, *changing):
        thread.start()
    for thread in changing:
        thread.join()
    is_over.set()
    looking.join()
    assert len(file.read()) == 40
    assert seen == sorted(seen)


def test_a_stamp_differs_once_the_file_was_replaced(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    stamps = [file.stamp()]
    for name in ("a", "b"):
        with file.changing() as tokens:
            tokens.append(made(name)[0])
        stamps.append(file.stamp())
    assert len(set(stamps)) == 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda document: document | {"version": 2},
            "it has version 2; this Runnel knows version 1",
        ),
        (lambda document: document | {"tokens": document["tokens"] * 2}, "is there twice"),
        (lambda document: {"tokens": []}, "missing required field `version`"),
        (lambda document: _changed(document, allow=["fly:*"]), "'fly:*' is not a right"),
        (lambda document: _changed(document, allow="a"), "Expected `array`"),
        (lambda document: _changed(document, sha256="x"), "sha256 is not 64 hexadecimal digits"),
        (lambda document: _changed(document, connections_max=0), "must be 1 at least"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused_by_name(
    tmp_path: Path, change: object, problem: str
) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    with file.changing() as tokens:
        tokens.append(made()[0])
    assert callable(change)
    file.path.write_text(json.dumps(change(json.loads(file.path.read_text()))))
    with pytest.raises(SettingsError, match="is not a file of tokens") as refused:
        file.read()
    assert problem in str(refused.value)
    assert str(file.path) in str(refused.value)


def _changed(document: dict[str, object], **fields: object) -> dict[str, object]:
    tokens = document["tokens"]
    assert isinstance(tokens, list)
    return document | {"tokens": [tokens[0] | fields]}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"[" * 100_000])
def test_rubbish_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens.json"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match="is not a file of tokens"):
        TokenFile(path).read()


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SettingsError, match="cannot be changed"),
        TokenFile(tmp_path / "file" / "tokens.json").changing(),
    ):
        raise AssertionError("it was opened")
    (tmp_path / "tokens.json").mkdir()
    with pytest.raises(SettingsError, match="cannot be read"):
        TokenFile(tmp_path / "tokens.json").read()
