"""`runnel pipeline sql`: one SQL statement from topics into a topic or a table."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import typer

from runnel.cli.connecting import DEFAULT_URL, Url
from runnel.cli.pipeline.flags import (
    DEFAULT_MASTER,
    Checkpoint,
    Conf,
    Master,
    needs_spark,
    open_session,
)
from runnel.cli.pipeline.showing import ProgressLine, text_of
from runnel.errors import ClientFault


class _Mode(enum.StrEnum):
    APPEND = "append"
    UPDATE = "update"
    COMPLETE = "complete"


def sql(
    statement: Annotated[
        str, typer.Argument(metavar="STATEMENT", help="A query, as SELECT … FROM STREAM sensors.")
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
            help="The topics that a name in the statement stands for. Without: the topic of that name.",
        ),
    ] = None,
    schemas: Annotated[
        list[str] | None,
        typer.Option(
            "--json",
            metavar="NAME=FIELDS",
            help="Payloads of this name are JSON objects of these fields, as 'celsius double, station string'.",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Take what is stored now, and end. Without: go on.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Begin a micro-batch so often, as '10 seconds'."),
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            metavar="PLACE", help="Where to begin without a checkpoint: earliest or latest."
        ),
    ] = "earliest",
    mode: Annotated[
        _Mode, typer.Option(help="Which rows of an aggregation to write: Spark's output mode.")
    ] = _Mode.APPEND,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The pipeline's name. Without: that of the target."),
    ] = None,
    dead_letters: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC",
            help="Where messages that do not parse and rows that cannot be published go. Without: !dead/NAME. "
            "Empty: nowhere, they end the query.",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="An option of reading, as maxRowsPerTrigger=10000."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    url: Url = DEFAULT_URL,
    master: Master = DEFAULT_MASTER,
    conf: Conf = None,
) -> None:
    """Run an SQL statement over topics, into a topic or a table.

    FROM STREAM name is a query that goes on; FROM name reads what is stored. Rows with a column payload are messages;
    of others, all columns become a JSON object, beside key, tags and event_time. Without --checkpoint nothing is
    remembered, and the next run begins at --start again.
    """
    from_sources = pairs("--from", sources, "sensors=sensors/*")
    of_schemas = pairs("--json", schemas, "sensors=celsius double")
    of_options = pairs("--option", option, "maxRowsPerTrigger=10000")
    with needs_spark():
        from runnel.spark.pipelines.sql import sql as run_sql
        from runnel.spark.pipelines.statement import check_query
        from runnel.spark.pipelines.target import Target

    check_query(statement)  # these two before Spark is started, which takes long
    Target.parse(into)
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
    """`NAME=VALUE`, each name once."""
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
