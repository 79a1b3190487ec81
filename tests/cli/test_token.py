"""`runnel token`, and commands that send a token to a running broker."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path

import pytest

from runnel.cli.commands.token import token_table
from runnel.cli.main import run
from runnel.log.segments.paths import FORMAT_FILE
from runnel.security.tokens import Token
from tests.cli.conftest import running, serving

ASKING = ("--set", "security.authentication=token")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RUNNEL_TOKEN", "RUNNEL_URL", "RUNNEL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def token(data: Path, *words: str) -> int:
    command, *rest = words
    return run(["token", command, "--data", str(data), *rest])


def made(data: Path, capfd: Captured, name: str, *allow: str) -> str:
    words = [word for right in allow for word in ("--allow", right)]
    assert token(data, "add", name, *words) == 0
    return capfd.readouterr().out.strip()


def test_a_token_is_printed_once_and_stored_as_a_hash(data: Path, capfd: Captured) -> None:
    assert token(data, "add", "gateway", "--allow", "publish:sensors/*", *ASKING) == 0
    captured = capfd.readouterr()
    text = captured.out.strip()
    assert captured.out == f"{text}\n"
    assert text.startswith("runnel_")
    assert "RUNNEL_TOKEN" in captured.err
    assert "nobody is asked for a token" not in captured.err
    file = data / "tokens.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = text.split("_", 2)[2]
    assert secret not in file.read_text()
    for form in ((), ("--json",)):
        assert token(data, "list", *form) == 0
        captured = capfd.readouterr()
        assert "gateway" in captured.out
        assert secret not in captured.out + captured.err


def test_tokens_are_listed_in_a_table(data: Path) -> None:
    tokens = [
        Token(id="1", name="a", sha256="", allow=("read:*", "read:!system/*"), made_ns=0),
        Token(
            id="2", name="b", sha256="", allow=("admin:*",), made_ns=10**18, connections_max=1500
        ),
    ]
    assert token_table(tokens).lines() == [
        "token  allowed         connections  made",
        "a      read:*                       1970-01-01T00:00:00Z",
        "       read:!system/*",
        "b      admin:*               1,500  2001-09-09T01:46:40Z",
    ]


def test_tokens_are_listed_for_programs(data: Path, capfd: Captured) -> None:
    assert token(data, "add", "b", "--allow", "read:*", "--connections-max", "5") == 0
    made(data, capfd, "a", "publish:x", "publish:x", "read:y")
    assert token(data, "list", "--json") == 0
    listed = json.loads(capfd.readouterr().out)
    assert [(each["name"], each["allow"], each["connections_max"]) for each in listed] == [
        ("a", ["publish:x", "read:y"], None),
        ("b", ["read:*"], 5),
    ]
    assert listed[0].keys() == {
        "name", "id", "allow", "connections_max", "quotas", "made", "made_ns",
    }  # fmt: skip


def test_quotas_of_a_token_are_kept_shown_and_changed(data: Path, capfd: Captured) -> None:
    quotas = ("--quota", "topics_max=50", "--quota", "bytes_in_per_s=10MiB")
    assert token(data, "add", "a", "--allow", "read:*", *quotas) == 0
    capfd.readouterr()
    assert token(data, "list", "--json") == 0
    (listed,) = json.loads(capfd.readouterr().out)
    assert listed["quotas"] == {"topics_max": 50, "bytes_in_per_s": 10 * 2**20}
    assert token(data, "list") == 0
    heading, first, second = capfd.readouterr().out.splitlines()
    assert heading.split() == ["token", "allowed", "connections", "made", "quotas"]
    assert first.split()[0] == "a"
    assert first.split()[-1] == "topics_max=50"
    assert second.split() == [f"bytes_in_per_s={10 * 2**20}"]
    assert token(data, "change", "a", "--allow", "read:*") == 0
    capfd.readouterr()
    assert token(data, "list", "--json") == 0
    (listed,) = json.loads(capfd.readouterr().out)
    assert listed["quotas"] == {}


@pytest.mark.parametrize(
    ("quota", "told"),
    [
        ("topics=5", "topics_max"),
        ("topics_max", "NAME=N"),
        ("topics_max=many", "not a whole number"),
        ("topics_max=-1", "0 at least"),
        ("bytes_in_per_s=10M", "1000 or 1024"),
    ],
)
def test_what_is_no_quota_is_told_so(data: Path, capfd: Captured, quota: str, told: str) -> None:
    assert token(data, "add", "a", "--allow", "read:*", "--quota", quota) != 0
    assert told in capfd.readouterr().err


def test_no_tokens_and_settings_that_do_not_ask_are_said_beside_the_output(
    data: Path, capfd: Captured
) -> None:
    assert token(data, "list") == 0
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "there are no tokens" in captured.err
    assert 'security.authentication = "token" changes that' in captured.err
    assert not data.exists()  # looking makes nothing


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["add", "a", "--allow", "read:*"], "there is a token 'a' already"),
        (["add", "b"], "would be allowed nothing"),
        (["add", "b", "--allow", "fly:*"], "'fly:*' is not a right: RIGHT:PATTERN"),
        (["add", "b", "--allow", "read:x["], "a set that is not closed"),
        (["add", "b/c", "--allow", "read:x"], "cannot be a token's name"),
        (["add", "b", "--allow", "read:x", "--connections-max", "0"], "greater than or equal to 1"),
        (["change", "b", "--allow", "read:*"], "there is no token 'b'"),
        (["change", "a"], "would be allowed nothing"),
        (["revoke", "b"], "there is no token 'b'"),
        (["add", "b", "--allow", "read:x", "--data", "memory:"], "set security.tokens_file"),
        (["list", "--set", "nope=1"], "unknown key nope"),
    ],
)
def test_what_is_wrong_is_said_in_words(
    data: Path, capfd: Captured, words: list[str], problem: str
) -> None:
    made(data, capfd, "a", "read:*")
    before = (data / "tokens.json").read_bytes()
    assert token(data, *words) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert problem in captured.err
    assert (data / "tokens.json").read_bytes() == before


def test_the_file_is_where_the_settings_say(data: Path, capfd: Captured) -> None:
    settings = data.parent / "runnel.toml"
    settings.write_text('data = "memory:"\n[security]\ntokens_file = "elsewhere.json"\n')
    assert run(["token", "add", "a", "--allow", "read:*"]) == 0
    assert (data.parent / "elsewhere.json").exists()


def test_each_change_says_which_file_was_written(data: Path, capfd: Captured) -> None:
    note = f"note: {data} is no data directory of a broker yet; one that has its data elsewhere"
    for words in (["add", "a", "--allow", "read:*"], ["change", "a", "--allow", "read:x"]):
        assert run(["token", *words, "--data", "data"]) == 0  # beneath the working directory
        told = capfd.readouterr().err
        assert f" a in {data / 'tokens.json'}\n" in told
        assert note in told
    (data / FORMAT_FILE).touch()  # as a broker's first start leaves it
    assert token(data, "revoke", "a") == 0
    assert capfd.readouterr().err == f"revoked a in {data / 'tokens.json'}\n"
    elsewhere = data.parent / "tokens" / "own.json"  # named, so no guess of ours
    named = ("--set", f"security.tokens_file={elsewhere}")
    assert run(["token", "add", "a", "--allow", "read:*", "--data", "none", *named]) == 0
    told = capfd.readouterr().err
    assert f"added a in {elsewhere}\n" in told
    assert "data directory" not in told


def test_a_running_broker_knows_at_once(
    data: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(data, *ASKING) as (broker, url):
        monkeypatch.setenv("RUNNEL_URL", url)
        assert run(["pub", "sensors/a", "1"]) == 2
        assert "this broker asks for a token, and none was shown" in capfd.readouterr().err
        text = made(data, capfd, "gateway", "publish:sensors/*")
        monkeypatch.setenv("RUNNEL_TOKEN", text)
        assert run(["pub", "sensors/a", "1", "-q"]) == 0
        assert run(["poll", "sensors/a"]) == 2
        assert (
            "token 'gateway' has no right to read for topic 'sensors/a'" in capfd.readouterr().err
        )
        assert token(data, "change", "gateway", "--allow", "read:sensors/*") == 0
        assert run(["poll", "sensors/a", "--format", "raw"]) == 0
        assert capfd.readouterr().out == "1\n"
        assert run(["pub", "sensors/a", "2"]) == 2
        assert token(data, "revoke", "gateway") == 0
        assert run(["poll", "sensors/a"]) == 2
        assert "revoked, or mistyped" in capfd.readouterr().err
        code, told = broker.end(signal.SIGTERM)
    assert code == 0
    assert "no client can connect: there is no token yet" in told
    assert text.split("_", 2)[2] not in told


def test_a_command_that_waits_ends_when_its_token_is_revoked(
    data: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(data, *ASKING) as (_, url):
        monkeypatch.setenv("RUNNEL_URL", url)
        writer = made(data, capfd, "writer", "publish:a")
        reader = made(data, capfd, "reader", "read:a")
        with running(["sub", "a", "--from", "earliest"], url, reader) as waiting:
            monkeypatch.setenv("RUNNEL_TOKEN", writer)
            assert run(["pub", "a", "heard", "-q"]) == 0
            assert "heard" in waiting.line()
            assert token(data, "revoke", "reader") == 0
            assert waiting.process.wait(timeout=30) == 2
            assert waiting.process.stderr is not None
            assert b"token 'reader' was revoked" in waiting.process.stderr.read()
