"""`runnel pipeline`: what Spark does with stored streams. Spark itself is imported by the command that runs."""

from __future__ import annotations

import typer

from runnel.cli.pipeline.archive import archive
from runnel.cli.pipeline.init import init
from runnel.cli.pipeline.replay import replay
from runnel.cli.pipeline.run import run
from runnel.cli.pipeline.sql import sql
from runnel.cli.pipeline.stats import stats

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _pipeline() -> None:
    """Archive, replay, measure and transform stored streams with Spark.

    Needs what `pip install '.[spark]'` installs, Java included. Without --master, Spark runs on this machine.
    """


app.command("archive")(archive)
app.command("replay")(replay)
app.command("stats")(stats)
app.command("sql")(sql)
app.command("init")(init)
app.command("run")(run)
