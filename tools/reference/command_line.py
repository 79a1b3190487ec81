"""docs/reference/cli.md: every command with its arguments and options, as `--help` has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

import typer
import typer.main

from runnel.cli.main import COMMANDS
from tools.reference.markdown import anchor, code, head, page, prose, table

_EXTRA: Final = re.compile(r"\s*\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]$")
_BETWEEN: Final = re.compile(r"(\S+)<=x<=(\S+)")
_LEAST: Final = re.compile(r"x>=(\S+)")
_KIND: Final = re.compile(r" <[^>]*>$")


def command_line_page() -> str:
    commands = [found for name in COMMANDS for found in _commands(name)]
    lines = head(
        "The command line",
        "Every command, with every argument and option: the same that `runnel COMMAND --help` prints. "
        "[cli.md](../cli.md) goes by what you want to do, has examples that are run, and the exit codes.",
        "`-h` and `--help` belong to every command and are not listed. Commands that talk to a broker take a "
        "token from the variable `RUNNEL_TOKEN`. `runnel --version` prints the version; `runnel "
        "--install-completion` teaches your shell the names.",
    )
    rows = [
        (f"[`{path}`](#{anchor(path)})", _first_sentence(command.help))
        for path, command in commands
    ]
    lines += table(("command", "what it does"), rows)
    for path, command in commands:
        lines += _section(path, command)
    return page(lines)


def _commands(name: str) -> Iterator[tuple[str, Any]]:
    """A command, or all commands of a group, by the words that call them."""
    # Typer keeps the types of what it makes private.
    command: Any = typer.main.get_command(import_module(f"runnel.cli.commands.{name}").app)
    yield from _within(f"runnel {name}", command)


def _within(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    parts = getattr(command, "commands", None)
    if parts is None:
        yield path, command
        return
    for name, part in parts.items():
        yield from _within(f"{path} {name}", part)


def _section(path: str, command: Any) -> list[str]:
    context = typer.Context(command, info_name=path)
    arguments, options = [], []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or parameter.name == "help":
            continue
        word, (text, extra) = record[0], _split(record[1])
        if parameter.param_type_name == "argument":
            many = "…" if parameter.nargs == -1 else ""
            arguments.append((code(_KIND.sub("", word).strip("[]") + many), text, extra))
        else:
            is_told = "many times" in text or "often" in text
            often = " May be given many times." if parameter.multiple and not is_told else ""
            options.append((code(word), text + often, extra))
    usage = " ".join((path, *(["[OPTIONS]"] if options else ()), *_operands(command)))
    lines = [f"## {path}", "", code(usage), "", *prose(command.help or "")]
    lines += table(("argument", "meaning", "must be"), arguments)
    lines += table(("option", "meaning", "default; must be"), options)
    return lines


def _operands(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = (parameter.metavar or parameter.name.upper()).strip("[]") + (
                "…" if parameter.nargs == -1 else ""
            )
            yield name if parameter.required else f"[{name}]"


def _split(text: str) -> tuple[str, str]:
    """The words, and what Typer adds in brackets: default, limits, variable, required."""
    found = _EXTRA.search(text)
    if found is None:
        return text.strip(), ""
    parts = []
    for part in found[1].split("; "):
        between, least = _BETWEEN.fullmatch(part), _LEAST.fullmatch(part)
        if between:
            part = f"{between[1]} to {between[2]}"
        elif least:
            part = f"at least {least[1]}"
        elif ": " in part:
            name, _, value = part.partition(": ")
            part = code(value) if name == "default" else f"or {code(value)}"
        parts.append(part)
    return text[: found.start()].strip(), "; ".join(sorted(parts, key=lambda part: part[:1] != "`"))


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())
