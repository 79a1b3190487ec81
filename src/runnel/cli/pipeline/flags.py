"""The flags that pipelines share, and the Spark session that they ask for."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from runnel.cli.connecting import run_connected
from runnel.cli.pipeline.overheard import overheard
from runnel.cli.times import NS_PER_SECOND
from runnel.config.units import parse_duration
from runnel.errors import ClientFault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from runnel.client import Bus

DEFAULT_MASTER: Final = "local[*]"
_CONNECT: Final = "sc://"
_WAREHOUSE: Final = "spark.sql.warehouse.dir"
# Read by runnel.spark's log4j2.properties: the level of what Spark says of a query or task that fails. (A name that
# begins with RUNNEL_ would be a setting of the broker.)
_TRACES: Final = "SPARK_RUNNEL_TRACES"

Master = Annotated[
    str,
    typer.Option(
        metavar="MASTER",
        help="Where Spark runs: local[4], spark://HOST:PORT, or any other master; sc://HOST:PORT for Spark Connect.",
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A setting of Spark's. As often as you like."),
]
Topics = Annotated[
    str | None, typer.Option(metavar="A,B,…", help="The topics, with commas between them.")
]
TopicPattern = Annotated[
    str | None, typer.Option(metavar="PATTERN", help="Topics such as 'sensors/*'.")
]
Starting = Annotated[
    str,
    typer.Option(
        metavar="PLACE", help="Where to begin the first time: earliest, latest, or a time."
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Take what is there now, and end. Else: go on.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Where the pipeline keeps how far it is, to go on from there."
    ),
]


def seconds(option: str, text: str) -> float:
    """A duration as people write it, of an option: 10s, 1h."""
    return duration_ns(option, text) / NS_PER_SECOND


def duration_ns(option: str, text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ClientFault(f"{option} {text!r}: {error}") from None


@contextmanager
def needs_spark() -> Iterator[None]:
    """For imports of what the extra `spark` brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ClientFault(
            f"pipelines need Spark, and {error.name} is not here: pip install '.[spark]'"
        ) from None


def spark_settings(conf: Sequence[str] | None) -> dict[str, str]:
    """What --conf says."""
    settings = {}
    for setting in conf or ():
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise ClientFault(
                f"--conf {setting!r}: it must be NAME=VALUE, as spark.driver.memory=2g"
            )
        settings[name.strip()] = value
    return settings


def open_session(
    app: str, master: str, conf: Sequence[str] | None, *, broker: str | None = None
) -> SparkSession:
    """A session as the flags say. ClientFault without the extra `spark`.

    A `broker` that is not there is told of before Spark is started, which takes long.
    """
    settings = spark_settings(conf)
    with needs_spark():
        from runnel.spark.session import said_elsewhere, session

    if broker is not None and not master.startswith(_CONNECT):
        run_connected(broker, _nothing)
    quiet_failures()
    if not master.startswith(_CONNECT) and _WAREHOUSE not in said_elsewhere():
        # Spark makes this directory as soon as a table is named, else in the current one. Nothing is written there.
        settings.setdefault(_WAREHOUSE, str(Path(tempfile.gettempdir()) / "runnel-spark-warehouse"))
    typer.echo("starting Spark", err=True)
    _quiet_interrupts()
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with overheard():
            return session(f"runnel {app}", master, settings)
    finally:
        # Spark's own handler calls Java, in the midst of whatever call to Java is under way, and both fail.
        signal.signal(signal.SIGINT, on_interrupt)


async def _nothing(_: Bus) -> None:
    pass


def quiet_failures() -> None:
    """The command tells why it failed, in a sentence: Spark's traces beside it are for those who ask for them."""
    os.environ.setdefault(_TRACES, "off")


def _quiet_interrupts() -> None:
    """What PySpark tells of calls and connections that Ctrl-C ends, with a trace each."""
    from pyspark import accumulators

    # What runs between Python and Java logs under its own name, and to the root logger itself.
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: record.name.partition(".")[0] not in ("py4j", "root"))
    logging.root.addHandler(handler)
    for server in (accumulators.AccumulatorTCPServer, accumulators.AccumulatorUnixServer):
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
