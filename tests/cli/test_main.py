"""The command line itself: quick help, exit codes, and tracebacks only for bugs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import runnel.cli.commands.config
from runnel.cli.main import COMMANDS, MEANT, exit_code_of, run
from runnel.errors import (
    BusyError,
    CorruptionError,
    FormatVersionError,
    LockedError,
    RunnelError,
    SettingsError,
    UnknownTopicError,
)

HEAVY = ("asyncio", "lz4", "msgspec", "numpy", "pyarrow", "pygments", "rich", "zstandard")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `runnel config show` fail with `error`."""

    def load(**_: object) -> None:
        raise error

    monkeypatch.setattr(runnel.cli.commands.config, "load", load)


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from runnel.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])\n"
        "print('modules:', [name for name in sys.modules if name.startswith('runnel.cli.')])\n"
    )
    ended = python(code)
    assert ended.stderr == ""
    for name in COMMANDS:
        assert f"\n  {name} " in ended.stdout
    assert "loaded: []" in ended.stdout
    assert "modules: ['runnel.cli.main']" in ended.stdout


def test_help_of_a_group_is_that_of_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage: runnel config" in out
    assert "show" in out


def test_module_is_the_command() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "runnel", "config", "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0
    assert ended.stdout.startswith("Usage: runnel config")


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("runnel 0.")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["confg"], "No such command 'confg'. Did you mean 'config'?"),
        (["subscribe", "a"], "No such command 'subscribe'. Did you mean 'sub'?"),
        (["publish", "a", "x"], "No such command 'publish'. Did you mean 'pub'?"),
        (["ls"], "No such command 'ls'. Did you mean 'topics'?"),
        (["dump"], "No such command 'dump'. Did you mean 'log export'?"),
        (["config", "shw"], "No such command 'shw'. Did you mean 'show'?"),
        (["config", "show", "--nope"], "No such option: --nope"),
    ],
)
def test_wrong_usage_is_refused_with_exit_code_2(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert problem in capsys.readouterr().err


def test_what_is_suggested_for_a_command_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    for word, meant in MEANT.items():
        assert word not in COMMANDS
        assert run([*meant.split(), "--help"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: runnel {meant}")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("x"), 2),
        (UnknownTopicError("x"), 2),
        (BusyError("x"), 3),
        (LockedError("x"), 3),
        (CorruptionError("file", 5, "x"), 1),
        (FormatVersionError("x"), 1),
        (RunnelError("x"), 1),
    ],
)
def test_exit_code_says_whose_fault_it_was(error: RunnelError, code: int) -> None:
    assert exit_code_of(error) == code


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CorruptionError("a.seg", 7, "bad checksum"), 1, "error: a.seg:7: bad checksum\n"),
        (LockedError("data is open elsewhere"), 3, "error: data is open elsewhere\n"),
        (FileNotFoundError(2, "No such file", "x"), 1, "error: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
    ],
)
def test_failure_becomes_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The command line guards the streams of a process that is about to end; this one goes on.
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    raising(error, monkeypatch)
    assert run(["config", "show"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("module", ["typing", "collections.abc", "typer.core"])
def test_interrupt_while_the_command_line_is_imported_has_no_traceback(module: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupter:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.modules.pop({module!r}, None)\n"
        "sys.meta_path.insert(0, Interrupter())\n"
        "import runnel.__main__\n"
    )
    ended = python(code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(ZeroDivisionError("a bug"), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        run(["config", "show"])


def test_reader_that_leaves_early_hears_no_complaint() -> None:
    code = (
        "import subprocess, sys\n"
        "writer = subprocess.Popen(\n"
        "    [sys.executable, '-m', 'runnel', 'config', 'reference'], stdout=subprocess.PIPE\n"
        ")\n"
        "writer.stdout.close()\n"
        "sys.exit(writer.wait())\n"
    )
    ended = python(code)
    assert ended.stderr == ""
    assert ended.returncode == 1


def test_output_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("w") as out:
        ended = subprocess.run(
            [sys.executable, "-m", "runnel", "config", "reference"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert ended.stderr == "error: [Errno 28] No space left on device: 'standard output'\n"
    assert ended.returncode == 1
