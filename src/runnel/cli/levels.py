"""The option --level: what a publisher waits for."""

from __future__ import annotations

from typing import Any

import typer

from runnel.errors import ClientFault
from runnel.log.log import Level


def level_option(help_text: str) -> Any:
    """With the words of other brokers known to its error, which those of an enum's option are not."""
    return typer.Option(
        parser=_parse,
        metavar=f"[{'|'.join(Level)}]",
        autocompletion=lambda: list(Level),
        help=help_text,
    )


def _parse(text: str) -> Level:
    try:
        return Level.checked(text)
    except ClientFault as error:
        raise ClientFault(f"--level: {error}") from None
