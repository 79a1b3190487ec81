"""`runnel pipeline run`: runs a user's project of Declarative Pipelines."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from runnel.cli.commands.pipeline.options import (
    DEFAULT_MASTER,
    Conf,
    Master,
    needs_spark,
    quiet_failures,
    spark_settings,
)
from runnel.cli.commands.pipeline.stderr_filter import filtered_stderr
from runnel.cli.connection import DEFAULT_URL, Url


def run(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="[DIR]", help="Directory of the project. Default: the current directory."
        ),
    ] = Path(),
    *,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this table or view. Repeatable."),
    ] = None,
    full_refresh: Annotated[
        bool,
        typer.Option(
            "--full-refresh",
            help="Discard earlier results and compute everything again; with --table, only for those "
            "tables.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the project without running it.")
    ] = False,
    url: Url = DEFAULT_URL,
    master: Master = DEFAULT_MASTER,
    conf: Conf = None,
) -> None:
    """Run a project of Declarative Pipelines, such as one that `runnel pipeline init` makes.

    It processes the messages since the last run, and exits. The project finds --url in the variable RUNNEL_URL.
    """
    settings = spark_settings(conf)
    with needs_spark():
        from runnel.spark.pipelines.project import run_project

    begun_s = time.monotonic()

    def tell(event: str) -> None:
        print(f"{time.monotonic() - begun_s:5.0f}s  {event}", file=sys.stderr, flush=True)

    quiet_failures()
    tell("starting Spark")
    with filtered_stderr():
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
