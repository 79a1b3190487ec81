"""`runnel pipeline`: what Spark does with stored streams. Spark itself is imported by the command that runs."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _pipeline() -> None:
    """Archive, replay, measure and transform stored streams with Spark.

    Needs what `pip install 'runnel[spark]'` installs, Java included. Without --master, Spark runs on this machine.
    """
