"""`runnel pipeline init`: a project of Declarative Pipelines to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runnel.cli.pipeline.flags import needs_spark


def init(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="The project: a directory that is made.")
    ],
) -> None:
    """Make a project of Declarative Pipelines that runs as it is against a broker."""
    with needs_spark():
        from runnel.spark.pipelines.project import init_project

    for path in init_project(name):
        typer.echo(str(path))
    typer.echo(f"runnel pipeline run {name}   runs it; {name / 'README.md'} says more", err=True)
