"""`runnel pipeline`: archives, replays, measures and transforms stored streams with Spark.

Each command imports Spark when it runs.
"""

from __future__ import annotations

import typer

from runnel.cli.commands.pipeline.archive import archive
from runnel.cli.commands.pipeline.init import init
from runnel.cli.commands.pipeline.replay import replay
from runnel.cli.commands.pipeline.run import run
from runnel.cli.commands.pipeline.sql import sql
from runnel.cli.commands.pipeline.stats import stats

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _pipeline() -> None:
    """Archive, replay, measure and transform stored streams with Spark.

    Requires `pip install '.[spark]'`, which includes Java. Without --master, Spark runs on this machine.
    """


app.command("archive")(archive)
app.command("replay")(replay)
app.command("stats")(stats)
app.command("sql")(sql)
app.command("init")(init)
app.command("run")(run)
