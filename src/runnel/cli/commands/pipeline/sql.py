"""`runnel pipeline sql`: runs one SQL statement over topics, and writes to a topic or a table."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import typer

from runnel.cli.commands.pipeline.options import (
    DEFAULT_MASTER,
    Checkpoint,
    Conf,
    Master,
    needs_spark,
    open_session,
)
from runnel.cli.commands.pipeline.progress_line import ProgressLine, text_of
from runnel.cli.connection import DEFAULT_URL, Url
from runnel.errors import ClientFault


class OutputMode(enum.StrEnum):
    """Spark's output modes."""

    APPEND = "append"
    UPDATE = "update"
    COMPLETE = "complete"


def sql(
    statement: Annotated[
        str,
        typer.Argument(metavar="STATEMENT", help="A query, such as SELECT … FROM STREAM sensors."),
    ],
    *,
    into: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            help="topic:NAME; topic, if the rows have a column topic; or table:PATH, a Delta table.",
        ),
    ],
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="NAME=PATTERN",
            help="The topics behind a name in the statement. Default: the topic of that name. Repeatable.",
        ),
    ] = None,
    schemas: Annotated[
        list[str] | None,
        typer.Option(
            "--json",
            metavar="NAME=FIELDS",
            help="Parse the payloads of a name as JSON objects with these fields, such as 'celsius "
            "double, station string'. Repeatable.",
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Process the messages stored now, and exit. Default: continue."
        ),
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time between the starts of two micro-batches, such as '10 seconds'.",
        ),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            metavar="PLACE", help="Where to begin without a checkpoint: earliest or latest."
        ),
    ] = "earliest",
    mode: Annotated[
        OutputMode, typer.Option(help="Which rows of an aggregation to write: Spark's output mode.")
    ] = OutputMode.APPEND,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the pipeline. Default: the name of the target."),
    ] = None,
    dead_letters: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="Topic for messages that do not parse and rows that cannot be published. Default: "
            "!dead/NAME. Empty: no topic; such a message or row ends the query.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Set an option of the source, such as maxRowsPerTrigger=10000. Repeatable.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    url: Url = DEFAULT_URL,
    master: Master = DEFAULT_MASTER,
    conf: Conf = None,
) -> None:
    """Run an SQL statement over topics, and write the result to a topic or a table.

    FROM STREAM name is a query that continues; FROM name reads what is stored. Rows with a column payload become
    messages. In other rows, all columns except key, tags and event_time become a JSON object. Without --checkpoint,
    progress is not stored, and the next run begins at --start again.
    """
    from_sources = pairs("--from", sources, "sensors=sensors/*")
    of_schemas = pairs("--json", schemas, "sensors=celsius double")
    of_options = pairs("--option", option, "maxRowsPerTrigger=10000")
    with needs_spark():
        from runnel.spark.pipelines.sql import sql as run_sql
        from runnel.spark.pipelines.statement import check_query
        from runnel.spark.pipelines.target import QueryTarget

    check_query(statement)  # both checks come before Spark starts, which takes long
    QueryTarget.parse(into)
    spark = open_session("sql", master, conf, broker=url)

    with ProgressLine("sql") as line:
        done = run_sql(
            spark,
            statement,
            into=into,
            sources=from_sources,
            schemas=of_schemas,
            url=url,
            name=name,
            checkpoint=checkpoint,
            once=once,
            every=every,
            start=start,
            mode=mode.value,
            dead_letters=dead_letters,
            options=of_options,
            on_progress=line,
        )
    typer.echo(f"{into}: {text_of(done)}", err=True)


def pairs(flag: str, given: Sequence[str] | None, example: str) -> dict[str, str]:
    """Parse `NAME=VALUE` texts; each name may occur once."""
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name or not value:
            raise ClientFault(f"{flag} {text!r}: it must be NAME=VALUE, as {example}")
        if name in found:
            raise ClientFault(f"{flag} {text!r}: {name} is given twice")
        found[name] = value
    return found
