"""What a reader types: statements of a block, run by bash, or within this process where that is the same.

`runnel` alone, without pipes or variables, is run within this process, which is many times as quick.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Final
from unittest.mock import patch

import typer.main

from runnel.cli.main import app, run
from tests.docs.output import plain

COMMAND_SECONDS_MAX: Final = 100
STAND_INS: Final = Path(__file__).parent / "stand_ins"
# What only the whole of a block makes sense of.
_COMPOUND: Final = re.compile(
    r"<<|^\s*(for|while|until|if|case|function)\b|^\s*\w+\(\)", re.MULTILINE
)
_ONLY_BASH: Final = re.compile(r"[$`|<>;&()]")
# Every variable lasts from block to block, as it does in a terminal; so does the directory.
_REMEMBER: Final = "set -a; trap 'env -0 > \"$READER_STATE\"' EXIT\n"
_STATE: Final = "READER_STATE"
_OF_BASH: Final = ("_", "SHLVL", _STATE)


class Shell:
    """A reader's terminal between his commands: where he is, and his variables."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.environment = environment
        self._state = directory / ".reader-state"

    def run(self, statement: str) -> tuple[int, str]:
        """Its exit code, and all that it printed."""
        if words := plain_words(statement):
            return self._run_here(words[1:])
        with subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", _REMEMBER + statement],
            cwd=self.directory,
            env=self.environment | {_STATE: str(self._state)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=COMMAND_SECONDS_MAX)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # whatever bash started, too
                raise
        kept = dict(
            entry.split("=", 1) for entry in self._state.read_text().split("\0") if "=" in entry
        )
        self._state.unlink()
        self.directory = Path(kept["PWD"])
        self.environment = {name: kept[name] for name in kept if name not in _OF_BASH}
        return process.returncode, plain(printed)

    def _run_here(self, words: list[str]) -> tuple[int, str]:
        with self.at_home() as printed:
            code = run(words)
        return code, printed()

    @contextmanager
    def at_home(self) -> Iterator[Callable[[], str]]:
        """This process in the reader's place: his directory and variables, and what is printed is kept for him."""
        # A file, for some commands write to its descriptor; unbuffered, for both streams are in it.
        with (
            tempfile.TemporaryFile(buffering=0) as kept,
            io.TextIOWrapper(kept, encoding="utf-8", write_through=True) as stream,
        ):
            told = ""
            handlers = logging.root.handlers[
                :
            ]  # a command brings one that writes to its own stream
            with (
                patch.dict(os.environ, self.environment, clear=True),
                chdir(self.directory),
                redirect_stdout(stream),
                redirect_stderr(stream),
            ):
                try:
                    yield lambda: told
                finally:
                    logging.root.handlers[:] = handlers
                    told = plain(os.pread(kept.fileno(), kept.tell(), 0))


def reader_environment(**more: str) -> dict[str, str]:
    """That of this process without settings of Runnel, on a wide terminal without colours."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RUNNEL_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{STAND_INS}"
    return own | {"PATH": path, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "160"} | more


def statements(text: str) -> Iterator[str]:
    """A block cut into what is entered at a time: mostly lines."""
    if _COMPOUND.search(text):
        yield text
        return
    entered = ""
    for line in text.splitlines(keepends=True):
        entered += line
        if line.rstrip("\n").endswith("\\") or _is_open(entered):
            continue
        if shlex.split(entered, comments=True):
            yield entered.strip()
        entered = ""
    if entered:
        raise AssertionError(f"a quote is not closed: {entered}")


def plain_words(statement: str) -> list[str] | None:
    """The words of a `runnel` command that needs no shell; None for all else."""
    words = shlex.split(statement, comments=True)
    if words[:1] != ["runnel"] or words[1:2] == ["serve"] or "--exec" in words:
        # A broker sets up this process for itself, and commands of `--exec` print past it.
        return None
    bare = re.sub(r"'[^']*'|\"[^\"$`\\\\]*\"", "", statement)  # within quotes these mean nothing
    bare = re.sub(r"(^|\s)#.*", "", bare)
    return None if _ONLY_BASH.search(bare) else words


def runnel_commands(text: str) -> Iterator[list[str]]:
    """The words of every `runnel` command in a block, wherever in a pipe or a list it stands."""
    for statement in statements(text):
        lexer = shlex.shlex(statement, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, ";"]:
            if set(token) <= set("();<>|&"):
                if (command := _without_variables(words))[:1] == ["runnel"]:
                    yield command[1:]
                words = []
            else:
                words.append(token)


def check_command(words: list[str]) -> None:
    """That the command line understands it; nothing is done."""
    command = typer.main.get_command(app)
    context = command.make_context("runnel", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, f"no such command: runnel {shlex.join(words)}"
        command, context = found, found.make_context(name, rest, parent=context)


def _is_open(entered: str) -> bool:
    """Whether a quote goes on in the next line."""
    try:
        shlex.split(entered, comments=True)
    except ValueError:
        return True
    return False


def _without_variables(words: list[str]) -> list[str]:
    first = next((at for at, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    return words[first:]
