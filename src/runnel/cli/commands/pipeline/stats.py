"""`runnel pipeline stats`: counts and measures messages in windows of event time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from runnel.cli.commands.pipeline.options import (
    DEFAULT_MASTER,
    Checkpoint,
    Conf,
    Master,
    Once,
    Starting,
    TopicPattern,
    Topics,
    needs_spark,
    open_session,
    seconds,
)
from runnel.cli.commands.pipeline.progress_line import ProgressLine, text_of
from runnel.cli.connection import DEFAULT_URL, Url
from runnel.cli.render.tables import counted
from runnel.errors import ClientFault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def stats(
    *,
    topics: Topics = None,
    pattern: TopicPattern = None,
    window: Annotated[
        str, typer.Option(metavar="TIME", help="Length of each window of event time.")
    ] = "1m",
    slide: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time between the starts of two windows. Default: the length of a window.",
        ),
    ] = None,
    tags: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,…", help="Tags, separated by commas, whose values are counted separately."
        ),
    ] = None,
    late: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Messages received this long after their event time count as late."
        ),
    ] = "10s",
    to: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Delta table to add the statistics to.")
    ] = None,
    publish: Annotated[
        str,
        typer.Option(metavar="PREFIX", help="Prefix of the topics to publish the statistics to."),
    ] = "!system/stats",
    no_publish: Annotated[
        bool, typer.Option("--no-publish", help="Publish nothing: write only to the table.")
    ] = False,
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of this pipeline. Pipelines that run at once need different names.",
        ),
    ] = "main",
    starting: Starting = "earliest",
    once: Once = False,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="Time between two micro-batches, without --once.")
    ] = "5s",
    history: Annotated[
        bool,
        typer.Option(
            "--history",
            help="Count all stored messages, every window: into a new table, or printed as JSON.",
        ),
    ] = False,
    path: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="With --history: read this data directory, or a copy of one."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    master: Master = DEFAULT_MASTER,
    conf: Conf = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Count and measure messages in windows of event time: how many, how large, and how long each took to arrive.

    Each complete window of a topic becomes a message of !system/stats/NAME/TOPIC and, with --to, a row of a table.
    Watch them with `runnel sub '!system/stats/*' --from last`.
    """
    every_s = seconds("--every", every)
    what: dict[str, Any] = {
        "topics": topics,
        "pattern": pattern,
        "window_s": seconds("--window", window),
        "slide_s": None if slide is None else seconds("--slide", slide),
        "tags": [] if tags is None else [tag.strip() for tag in tags.split(",")],
        "late_s": seconds("--late", late),
    }
    if topics is None and pattern is None:
        raise ClientFault("which topics? --topics a,b or --pattern 'sensors/*'")
    if history:
        if once or checkpoint is not None:
            raise ClientFault("--history counts from the beginning: without --once or --checkpoint")
        what |= {"url": url} if path is None else {"path": path}
        session = open_session("stats", master, conf, broker=url if path is None else None)
        _count_history(session, what, to)
        return
    if path is not None:
        raise ClientFault("--path is for --history: files do not tell of what comes")
    with needs_spark():
        from runnel.spark.pipelines.stats.job import StatsPlan
    plan = StatsPlan.make(
        **what,
        table=to,
        publish=None if no_publish else publish,
        name=name,
        checkpoint=checkpoint,
        starting=starting,
        every_s=None if once else every_s,
        url=url,
    )
    session = open_session("stats", master, conf, broker=url)
    with ProgressLine("counted") as line:
        done = plan.run(session, line)
    typer.echo(f"counted {text_of(done)}", err=True)
    if done.dropped:
        typer.echo(
            f"not counted: {counted(done.dropped, 'group')} of messages, read too long after what other journals "
            "received at the same time; --history counts them",
            err=True,
        )


def _count_history(session: SparkSession, what: Mapping[str, Any], table: str | None) -> None:
    with needs_spark():
        from runnel.spark.pipelines.stats.history import documents, stats_history, write_stats
    rows = stats_history(session, **what)
    if table is None:
        for document in documents(rows):
            typer.echo(msgspec.json.encode(document).decode())
    else:
        typer.echo(f"counted {counted(write_stats(rows, table), 'window')} into {table}", err=True)
