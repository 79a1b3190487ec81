"""`runnel pipeline init`: makes an example project of Declarative Pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runnel.cli.commands.pipeline.options import needs_spark


def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="Directory of the new project.")],
) -> None:
    """Make a project of Declarative Pipelines that runs without changes against a broker."""
    with needs_spark():
        from runnel.spark.pipelines.project import init_project

    for path in init_project(name):
        typer.echo(str(path))
    typer.echo(f"runnel pipeline run {name}   runs it; {name / 'README.md'} says more", err=True)
