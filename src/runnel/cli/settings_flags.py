"""The options that give settings: the same for every command that takes any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from runnel.config import Flag

Config = Annotated[
    str | None, typer.Option(metavar="FILE", help="Settings file instead of ./runnel.toml.")
]
Data = Annotated[
    str | None, typer.Option(metavar="DIR", help="Data directory; the same as --set data=DIR.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting; may be given many times."),
]


def flags_of(
    assignments: Sequence[str] | None, data: str | None = None, listen: str | None = None
) -> list[Flag]:
    """An option of its own outweighs --set for the same key."""
    flags = [Flag.assigned(assignment) for assignment in assignments or ()]
    if data is not None:
        flags.append(Flag("data", data, "--data"))
    if listen is not None:
        flags.append(Flag("native.listen", listen, "--listen"))
    return flags
