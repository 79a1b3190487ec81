"""A reader who does what a page says, from top to bottom, in a directory and with brokers of his own."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.docs.block_checks import CHECKS, check, check_tested_elsewhere
from tests.docs.output import difference, end_of
from tests.docs.pages import ROOT, Block, PageError, Remark, Word, items_of, needs
from tests.docs.places import Places
from tests.docs.shell import Shell, reader_environment, statements
from tests.docs.terminal import Terminal

NATIVE, HTTP, GRPC = 7470, 7480, 7490
SETTLE_SECONDS_MAX: Final = 10.0
# So many looks in a row, so far apart, find everybody at rest.
RESTS: Final = 5
REST_SECONDS: Final = 0.02
_RUN: Final = frozenset({"python", "sh", "console", "js"})
_BROKER: Final = "the page's broker"
_SERVE: Final = "runnel serve"
_LISTENING: Final = "listening on "
_UNTIL: Final = " until "


class Reader:
    """What the blocks of one page have in common."""

    def __init__(self, page: str, directory: Path) -> None:
        self.page = page
        self._items = items_of(page)
        self._does_bring_broker = False
        self._places = Places(directory, is_with_spark=needs(page, "spark"))
        ports = {listener: self._places.port(listener) for listener in (NATIVE, HTTP, GRPC)}
        self._shell = Shell(
            directory,
            reader_environment(
                RUNNEL_URL=f"runnel://127.0.0.1:{ports[NATIVE]}",
                RUNNEL_NATIVE_LISTEN=f"127.0.0.1:{ports[NATIVE]}",
                RUNNEL_HTTP_LISTEN=f"127.0.0.1:{ports[HTTP]}",
                RUNNEL_GRPC_LISTEN=f"127.0.0.1:{ports[GRPC]}",
            ),
        )
        self._terminals: dict[str, Terminal] = {}
        self._names: dict[str, Any] = {"__name__": page}
        self._javascript = ""
        self._printed: str | None = None  # by the block before

    def read(self) -> None:
        """The whole page; what was said to keep running has to do so to its end."""
        self._read(self._items)
        for terminal in reversed(self._terminals.values()):  # a broker after its clients
            if not terminal.was_ended:
                terminal.interrupt()

    def close(self) -> None:
        """Whatever is left of it goes."""
        for terminal in self._terminals.values():
            terminal.close()

    def _read(self, items: list[Remark | Block]) -> None:
        for item in items:
            if isinstance(item, Remark):
                self._follow(item)
            else:
                self._meet(item)

    # --- Remarks ---

    def _follow(self, remark: Remark) -> None:
        match remark.word:
            case Word.BROKER:
                if remark.value != "none":
                    self._bring_broker(self._real(remark.value))
                self._does_bring_broker = True
            case Word.IN:
                self._copy(remark.value.split(", "))
            case Word.AFTER:  # another page, in the same place and with the same broker
                self._read(items_of(remark.value))
                self._printed = None
            case Word.HIDDEN:
                self._type(self._real(remark.value), f"{remark.page}:{remark.line}")
            case Word.CTRL_C:
                self._terminals[remark.value].interrupt()
            case Word.KILL:
                self._terminals[remark.value].kill()

    def _copy(self, folders: list[str]) -> None:
        """Folders of this repository; the reader then stands in the first."""
        top = self._shell.directory
        for folder in folders:
            for found in filter(Path.is_file, (ROOT / folder).iterdir()):
                path = top / folder / found.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._real(found.read_text(encoding="utf-8")), encoding="utf-8")
        self._shell.directory = top / folders[0]

    # --- Blocks ---

    def _meet(self, block: Block) -> None:
        try:
            self._run(block)
        except (AssertionError, PageError):
            raise
        except Exception as error:
            raise AssertionError(f"{block}: {type(error).__name__}: {error}") from error

    def _run(self, block: Block) -> None:
        notes = block.notes
        if Word.TESTED_BY in notes:
            check_tested_elsewhere(block)
        elif Word.FILE in notes:
            self._write(block)
        elif block.language == "text":
            self._compare(block)
        elif Word.ONLY_PARSED in notes or block.language not in _RUN:
            assert notes.get(Word.ONLY_PARSED) != "", f"{block}: it has to say why"
            check(block)
        else:
            self._bring_broker()
            self._printed = None
            match block.language:
                case "python":
                    self._run_python(block)
                case "sh":
                    self._run_sh(block)
                case "console":
                    self._run_console(block)
                case "js":
                    self._run_js(block)

    def _write(self, block: Block) -> None:
        if block.language in CHECKS:
            check(block)
        path = self._shell.directory / self._real(block.notes[Word.FILE])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._real(block.text), encoding="utf-8")

    def _run_python(self, block: Block) -> None:
        if {Word.KEEPS_RUNNING, Word.RUNS_UNTIL} & block.notes.keys():
            program = self._shell.directory / f"block_{block.line}.py"
            program.write_text(self._real(block.text), encoding="utf-8")
            self._start_as_noted(block, [f"{sys.executable} -u {program}"])
            return
        # As in a notebook, `await` may stand alone. The line of an error is that of the page.
        placed = "\n" * (block.line - 1) + self._real(block.text)
        code = compile(placed, str(ROOT / self.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with self._shell.at_home() as printed:
            ended = eval(code, self._names)  # it is our own page
            if inspect.iscoroutine(ended):
                asyncio.run(ended)
        self._printed = printed()

    def _run_sh(self, block: Block) -> None:
        commands = [self._real(statement) for statement in statements(block.text)]
        if {Word.KEEPS_RUNNING, Word.RUNS_UNTIL} & block.notes.keys():
            self._start_as_noted(block, commands)
            return
        code = int(block.notes.get(Word.EXIT_CODE, "0"))
        printed = [self._type(command, str(block)) for command in commands[:-1]]
        printed.append(self._type(commands[-1], str(block), code))
        self._printed = "".join(printed)

    def _run_console(self, block: Block) -> None:
        """Commands behind `$ `, each with what it prints below it."""
        shown = list(_commands(block))
        is_last_kept = Word.KEEPS_RUNNING in block.notes
        for at, (command, expected) in enumerate(shown):
            is_last = at == len(shown) - 1
            if is_last and is_last_kept:
                self._start_as_noted(block, [self._real(command)])
                name, _, _ = block.notes[Word.KEEPS_RUNNING].partition(_UNTIL)
                self._compare_terminal(block, name, expected)
                continue
            code = int(block.notes.get(Word.EXIT_CODE, "0")) if is_last else 0
            printed = self._type(self._real(command), str(block), code)
            self._compare_text(block, expected, printed)

    def _run_js(self, block: Block) -> None:
        """With Node.js if the page needs it; the blocks of a page are one program that grows."""
        check(block)
        if not needs(self.page, "node"):
            return
        self._javascript += self._real(block.text)
        program = self._shell.directory / f"block_{block.line}.mjs"
        program.write_text(self._javascript, encoding="utf-8")
        if Word.RUNS_UNTIL in block.notes:
            self._start_as_noted(block, [f"node {program.name}"])
        else:
            self._printed = self._type(f"node {program.name}", str(block))

    # --- Output ---

    def _compare(self, block: Block) -> None:
        if Word.DRAWING in block.notes:
            return
        if Word.OUTPUT_OF in block.notes:
            self._compare_terminal(block, block.notes[Word.OUTPUT_OF], block.text)
            return
        if self._printed is None:
            raise PageError(f"{block}: there is no output before it; is it a drawing?")
        self._compare_text(block, block.text, self._printed)

    def _compare_text(self, block: Block, expected: str, printed: str) -> None:
        told = difference(
            expected,
            self._places.documented(printed),
            do_numbers_vary=Word.NUMBERS_VARY in block.notes,
        )
        assert told is None, f"{block}: {told}"

    def _compare_terminal(self, block: Block, name: str, expected: str) -> None:
        self._terminals[name].wait_for_output(
            expected, self._places.documented, do_numbers_vary=Word.NUMBERS_VARY in block.notes
        )

    # --- Commands ---

    def _real(self, text: str) -> str:
        return self._places.real(text)

    def _type(self, command: str, where: str, code: int = 0) -> str:
        """Run it to its end, which is expected to be so; what it printed."""
        ended, printed = self._shell.run(command)
        if command.startswith("npm ") and ended != 0:
            pytest.skip(f"npm cannot install the packages: {printed[-300:]}")
        assert ended == code, f"{where}: {command!r} ended with {ended}:\n{end_of(printed)}"
        return printed

    def _start_as_noted(self, block: Block, commands: list[str]) -> None:
        if Word.RUNS_UNTIL in block.notes:
            for command in commands:
                terminal = Terminal(command, self._shell.directory, self._shell.environment)
                self._terminals[f"{block}"] = terminal
                terminal.wait_for(self._real(block.notes[Word.RUNS_UNTIL]))
                terminal.interrupt()
                self._printed = terminal.text()
            return
        names, _, until = block.notes[Word.KEEPS_RUNNING].partition(_UNTIL)
        for name, command in zip(names.split(","), commands, strict=True):
            is_broker = command.startswith(_SERVE)
            self._start(name.strip(), command, until or (_LISTENING if is_broker else ""))

    def _start(self, name: str, command: str, until: str) -> None:
        if name in self._terminals:  # the same terminal, in which the former command has ended
            self._terminals.pop(name).close()
        terminal = Terminal(command, self._shell.directory, self._shell.environment)
        self._terminals[name] = terminal
        if until:
            terminal.wait_for(until)
        else:
            self._wait_until_settled(terminal)

    def _wait_until_settled(self, started: Terminal) -> None:
        """A reader types slowly: before his next command, this one is where it wants to be.

        It has found its broker, and neither of them has anything left to do.
        """
        ends_at, rests = time.monotonic() + SETTLE_SECONDS_MAX, 0
        while rests < RESTS and time.monotonic() < ends_at:
            running = [each for each in self._terminals.values() if not each.was_ended]
            is_settled = started.is_connected() and all(each.is_at_rest() for each in running)
            rests = rests + 1 if is_settled else 0
            time.sleep(REST_SECONDS)

    def _bring_broker(self, options: str = "") -> None:
        """The page's own, unless it has one; with those listeners only that the page speaks of."""
        if self._does_bring_broker:
            return
        self._does_bring_broker = True
        said = options + "".join(item.text for item in self._items if isinstance(item, Block))
        closed = [
            f"--{name} none"
            for name, port in (("http", HTTP), ("grpc", GRPC))
            if str(port) not in said and f"{name}." not in options
        ]
        self._start(_BROKER, " ".join([_SERVE, *closed, options]), _LISTENING)


@contextmanager
def reading(page: str, directory: Path) -> Iterator[Reader]:
    reader = Reader(page, directory)
    try:
        yield reader
    finally:
        reader.close()


def _commands(block: Block) -> Iterator[tuple[str, str]]:
    command, expected = "", ""
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if command:
                yield command, expected
            command, expected = line.removeprefix("$ "), ""
        elif not command:
            raise PageError(f"{block}: what is shown on a console begins with `$ ` and a command")
        elif line.startswith("> ") and not expected:
            command += "\n" + line.removeprefix("> ")
        else:
            expected += line + "\n"
    yield command, expected
