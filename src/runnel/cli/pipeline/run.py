"""`runnel pipeline run`: the user's own Declarative Pipelines."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from runnel.cli.connecting import DEFAULT_URL, Url
from runnel.cli.pipeline.flags import (
    DEFAULT_MASTER,
    Conf,
    Master,
    needs_spark,
    quiet_failures,
    spark_settings,
)
from runnel.cli.pipeline.overheard import overheard


def run(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The project. Without: this directory.")
    ] = Path(),
    *,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this table, or view. As often as you like."),
    ] = None,
    full_refresh: Annotated[
        bool,
        typer.Option(
            "--full-refresh", help="Forget what was done, and begin anew; of --table, if given."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the project, and do nothing.")
    ] = False,
    url: Url = DEFAULT_URL,
    master: Master = DEFAULT_MASTER,
    conf: Conf = None,
) -> None:
    """Run a project of Declarative Pipelines, as `runnel pipeline init` makes one.

    It takes what came since the last run, and ends. --url is passed on to the project as RUNNEL_URL.
    """
    settings = spark_settings(conf)
    with needs_spark():
        from runnel.spark.pipelines.project import run_project

    begun_s = time.monotonic()

    def tell(event: str) -> None:
        print(f"{time.monotonic() - begun_s:5.0f}s  {event}", file=sys.stderr, flush=True)

    quiet_failures()
    tell("starting Spark")
    with overheard():
        run_project(
            directory,
            master=master,
            url=url,
            conf=settings,
            tables=table or (),
            full_refresh=full_refresh,
            dry_run=dry_run,
            on_event=tell,
        )
