"""Options that several commands share, the default command of a group, and the question before data is lost."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer
import typer.core

from runnel.errors import ClientFault
from runnel.log.log import Level


class TableFormat(enum.StrEnum):
    """The formats of commands that list things."""

    TABLE = "table"
    JSON = "json"


Form = Annotated[
    TableFormat, typer.Option("--format", help="Print a table for people, or JSON for programs.")
]
AsJson = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


# --- Levels and tags ---


def level_option(help_text: str) -> Any:
    """The option --level. Its error suggests a level for the words of other brokers; an enum option's does not."""
    return typer.Option(
        parser=_parse_level,
        metavar=f"[{'|'.join(Level)}]",
        autocompletion=lambda: list(Level),
        help=help_text,
    )


def _parse_level(text: str) -> Level:
    try:
        return Level.checked(text)
    except ClientFault as error:
        raise ClientFault(f"--level: {error}") from None


def parse_tags(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` texts. The last value of a name wins."""
    return dict(_parse_tag(option, text) for text in texts)


def _parse_tag(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ClientFault(f"{option} {text!r}: write it as NAME=VALUE, such as unit=C")
    return name, value


# --- Groups of commands ---

DEFAULT_COMMAND: Final = "list"


class DefaultCommandGroup(typer.core.TyperGroup):
    """A group of commands whose default is `list`: `runnel topics` is `runnel topics list`."""

    # Typer keeps the types of these arguments private.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # During completion, a half-typed word may still become the name of a command.
        is_complete = not ctx.resilient_parsing
        if (is_complete or args) and not (args and self._is_command(ctx, args[0])):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def _is_command(self, ctx: Any, word: str) -> bool:
        return word in self.commands or word in ctx.help_option_names


# --- Confirmation ---


def confirm(question: str) -> None:
    """Return if the user answers yes. Without a terminal the user cannot answer, so --yes is required there."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ClientFault(f"{question} There is no terminal to ask at: say so with --yes")
    typer.echo(f"{question} [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(1)
