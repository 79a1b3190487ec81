"""A group of commands that does something when none of them is named: `runnel topics` is `runnel topics list`."""

from __future__ import annotations

from typing import Any, Final

import typer.core

DEFAULT: Final = "list"


class DefaultCommandGroup(typer.core.TyperGroup):
    """Puts `list` in front of arguments that do not begin with a command of the group."""

    # Typer keeps the types of these arguments private.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # What is being completed may yet become the name of a command.
        is_complete = not ctx.resilient_parsing
        if (is_complete or args) and not (args and self._is_ours(ctx, args[0])):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def _is_ours(self, ctx: Any, word: str) -> bool:
        return word in self.commands or word in ctx.help_option_names
