"""The options that give settings, for every command that reads settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from runnel.config import Flag

Config = Annotated[
    str | None, typer.Option(metavar="FILE", help="Settings file to read instead of ./runnel.toml.")
]
Data = Annotated[
    str | None, typer.Option(metavar="DIR", help="Data directory; the same as --set data=DIR.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set one setting. Repeatable."),
]


def flags_of(
    assignments: Sequence[str] | None, data: str | None = None, listen: str | None = None
) -> list[Flag]:
    """Combine the options. A setting's own option takes precedence over --set."""
    flags = [Flag.assigned(assignment) for assignment in assignments or ()]
    if data is not None:
        flags.append(Flag("data", data, "--data"))
    if listen is not None:
        flags.append(Flag("native.listen", listen, "--listen"))
    return flags
