"""Asking before something is lost for good."""

from __future__ import annotations

import sys

import typer

from runnel.errors import ClientFault


def confirm(question: str) -> None:
    """Returns if the answer is yes; without a terminal nobody can answer, so --yes is needed there."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise ClientFault(f"{question} There is no terminal to ask at: say so with --yes")
    typer.echo(f"{question} [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(1)
