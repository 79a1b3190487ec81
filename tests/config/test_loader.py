"""Which file is read, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from runnel.config import Flag, load
from runnel.errors import SettingsError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_file_in_the_working_directory_is_read(directory: Path) -> None:
    (directory / "runnel.toml").write_text("data = 'here'")
    loaded = load(environment={})
    assert loaded.settings.data == "here"
    assert str(loaded.sources["data"]) == "runnel.toml:1"


def test_missing_default_file_is_no_problem(directory: Path) -> None:
    assert load(environment={}).settings.data == "./runnel-data"


def test_named_file_outweighs_the_variable_and_the_default_one(directory: Path) -> None:
    for name in ("runnel", "variable", "flag"):
        (directory / f"{name}.toml").write_text(f"data = 'from {name}'")
    environment = {"RUNNEL_CONFIG": "variable.toml"}
    assert load(environment=environment).settings.data == "from variable"
    assert load(config_path="flag.toml", environment=environment).settings.data == "from flag"


def test_the_environment_of_the_process_is_the_default(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNEL_DATA", "from the environment")
    assert load().settings.data == "from the environment"
    assert load(flags=[Flag("data", "x", "--data")]).settings.data == "x"


def test_missing_named_file_is_refused_together_with_other_problems(directory: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        load(config_path="gone.toml", environment={"RUNNEL_DTA": "x"})
    assert str(refused.value).splitlines() == [
        "the settings have 2 problems:",
        "  gone.toml (--config): cannot read the settings file: No such file or directory",
        "  unknown variable RUNNEL_DTA; did you mean RUNNEL_DATA?",
    ]


def test_missing_file_of_the_variable_is_refused(directory: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.toml \(RUNNEL_CONFIG\): cannot read"):
        load(environment={"RUNNEL_CONFIG": "gone.toml"})


def test_directory_in_place_of_a_file_is_refused(directory: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read the settings file: Is a directory"):
        load(config_path=".", environment={})


def test_file_that_is_not_utf8_is_refused_with_the_position(directory: Path) -> None:
    (directory / "runnel.toml").write_bytes(b"data = '\xff'")
    with pytest.raises(SettingsError, match=r"runnel\.toml: not UTF-8 at byte 8"):
        load(environment={})


def test_path_that_cannot_be_one_is_refused(directory: Path) -> None:
    with pytest.raises(SettingsError, match=r"'a\\x00b' \(--config\): not a path"):
        load(config_path="a\0b", environment={})
