"""`runnel config show`: its output is a settings file, and names the source of every value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.cli.main import run
from runnel.config import (
    Keep,
    LimitSettings,
    LogSettings,
    Pin,
    Retain,
    Rotate,
    Settings,
    TopicRule,
    Until,
    merge,
)
from runnel.config.layers import Layer, default_layer, file_layer
from runnel.config.renderer import toml_lines

FILE = """\
data = "/var/lib/runnel"

[limits]
tags_max = 32

[[topics]]
match = "sensors/*"
retain = { age = "7d" }

[[topics]]
match = "chat/*"
keep = "none"
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RUNNEL_CONFIG", "RUNNEL_DATA", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "runnel.toml").write_text(FILE)
    return tmp_path


def test_every_value_is_shown_with_its_source(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUNNEL_LOG_WRITERS", "3")
    assert run(["config", "show", "--set", "limits.cursors_max=7", "--data", "d"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for expected in (
        ("data =", '"d"', "# --data"),
        ("tags_max =", "32", "# runnel.toml:4"),
        ("topics_max =", "1000000", "# default"),
        ("cursors_max =", "7", "# --set limits.cursors_max"),
        ("writers =", "3", "# RUNNEL_LOG_WRITERS"),
        ("retain.age =", '"7d"', "# runnel.toml:8"),
        ("keep =", '"none"', "# runnel.toml:12"),
    ):
        assert any(all(part in line for part in expected) for line in lines), expected
    columns = {line.index("#") for line in lines if "#" in line}
    assert len(columns) == 1


def test_output_used_as_a_file_gives_the_same_settings(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "show", "--set", "limits.tags_max=5", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "# Most tags of one message.\ntags_max = 5" in shown
    (directory / "again.toml").write_text(shown)
    assert run(["config", "show", "--config", "again.toml", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert run(["config", "show", "--set", "limits.tags_max=5", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert {name: each["value"] for name, each in again.items()} == {
        name: each["value"] for name, each in first.items()
    }


def test_json_gives_value_spelling_and_source(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["topics[0].retain.age"] == {
        "value": 7 * 86_400 * 10**9,
        "written": "7d",
        "origin": "file",
        "place": "runnel.toml:8",
    }
    assert shown["log.writers"] == {
        "value": 2,
        "written": 2,
        "origin": "default",
        "place": None,
    }


def test_output_that_is_no_terminal_has_no_colours(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "show"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_wrong_settings_are_refused_with_exit_code_2(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "runnel.toml").write_text('[limits]\ntag_max = 5\n"\\u001b[31m" = 1')
    assert run(["config", "show"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: the settings have 2 problems:\n"
        "  unknown key limits.tag_max = 5 (runnel.toml:2); did you mean limits.tags_max?\n"
        "  unknown key limits.?[31m = 1 (runnel.toml:1); `runnel config show` lists all keys\n"
    )


def test_reference_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "reference"]) == 0
    assert "| `limits.tags_max` | `64` | Most tags of one message. |" in capsys.readouterr().out


SIZES = st.integers(min_value=1, max_value=2**62)
DURATIONS = st.integers(min_value=10**9, max_value=2**62)
TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20).filter(
    lambda text: text != "none"
)


@st.composite
def rules(draw: st.DrawFn, match: str) -> TopicRule:
    keep = draw(st.sampled_from(Keep))
    partitions = draw(st.integers(min_value=1, max_value=1024))
    last_value = draw(st.booleans())
    if keep is Keep.NONE:
        return TopicRule(match=match, keep=keep, partitions=partitions, last_value=last_value)
    rotate_bytes_max = draw(st.integers(min_value=1, max_value=2**40))
    return TopicRule(
        match=match,
        keep=keep,
        partitions=partitions,
        last_value=last_value,
        journal=draw(st.sampled_from([None, "{topic}" + match, match + '"\\'])),
        rotate=Rotate(
            bytes_max=rotate_bytes_max,
            every_ns=draw(st.none() | st.integers(min_value=86_400 * 10**9, max_value=2**62)),
            at_ns=draw(st.integers(min_value=0, max_value=1439)) * 60 * 10**9,
        ),
        retain=Retain(
            age_ns=draw(st.none() | DURATIONS),
            bytes_max=draw(st.none() | st.integers(min_value=rotate_bytes_max, max_value=2**62)),
            until=draw(st.none() | st.just(Until.ACKED)),
        ),
        pin=Pin(age_ns=draw(st.none() | DURATIONS), bytes_max=draw(st.none() | SIZES)),
    )


@st.composite
def all_settings(draw: st.DrawFn) -> Settings:
    matches = draw(st.lists(TEXTS.map(lambda text: "a" + text), unique=True, max_size=3))
    return Settings(
        data=draw(TEXTS),
        limits=LimitSettings(
            message_bytes_max=draw(st.integers(min_value=1, max_value=2**20)),
            tag_bytes_max=draw(SIZES),
            topics_max=draw(SIZES),
        ),
        log=LogSettings(
            allocate_bytes=draw(st.integers(min_value=0, max_value=2**62)),
            retention_interval_ns=draw(DURATIONS),
        ),
        topics=tuple(draw(rules(match)) for match in matches),
    )


@given(all_settings())
def test_any_settings_survive_being_shown_and_read_back(settings: Settings) -> None:
    nothing = Layer()
    loaded = merge(default_layer(settings), nothing, nothing, nothing)
    assert loaded.settings == settings
    text = "\n".join(line.code for line in toml_lines(loaded))
    read_back = merge(default_layer(Settings()), file_layer(text, "shown.toml"), nothing, nothing)
    assert read_back.settings == settings
