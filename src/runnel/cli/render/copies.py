"""Verifies the copies of `runnel backup` and `runnel restore`, and prints the result."""

from __future__ import annotations

from pathlib import Path

import typer

from runnel.cli.render.tables import counted, human_bytes, printable
from runnel.log.reading import OfflineLog, Verified
from runnel.log.reading import verify as verify_log


def verified(directory: Path) -> Verified:
    """Check every checksum in the directory."""
    return verify_log(OfflineLog(str(directory)))


def tell_copy(directory: Path, copied_bytes: int, found: Verified) -> None:
    """Print what a copy contains. Exit with code 1 if some of it is damaged."""
    typer.echo(
        f"{printable(str(directory))}: {human_bytes(copied_bytes)}, {counted(found.messages, 'message')} in "
        f"{counted(found.segments, 'segment')}{'' if found.damage else ', verified'}"
    )
    tell_damage(found)
    if found.damage:
        raise typer.Exit(1)


def tell_damage(found: Verified) -> None:
    for damage in found.damage:
        typer.echo(f"damaged: {printable(str(damage))}", err=True)
