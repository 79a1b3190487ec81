"""The options that pipelines share, and the Spark session that they open."""

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

from runnel.cli.commands.pipeline.stderr_filter import filtered_stderr
from runnel.cli.connection import run_connected
from runnel.cli.render.times import NS_PER_SECOND
from runnel.config.units import parse_duration
from runnel.errors import ClientFault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from runnel.client import Bus

DEFAULT_MASTER: Final = "local[*]"
_CONNECT: Final = "sc://"
_WAREHOUSE: Final = "spark.sql.warehouse.dir"
# log4j2.properties of runnel.spark reads this: the level at which Spark logs a query or task that fails. (A name
# that begins with RUNNEL_ would be a setting of the broker.)
_TRACES: Final = "SPARK_RUNNEL_TRACES"

Master = Annotated[
    str,
    typer.Option(
        metavar="MASTER",
        help="Where Spark runs: local[4], spark://HOST:PORT or another master; sc://HOST:PORT for "
        "Spark Connect.",
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Set a Spark setting. Repeatable."),
]
Topics = Annotated[str | None, typer.Option(metavar="A,B,…", help="Topics, separated by commas.")]
TopicPattern = Annotated[
    str | None, typer.Option(metavar="PATTERN", help="Topics that match, such as 'sensors/*'.")
]
Starting = Annotated[
    str,
    typer.Option(metavar="PLACE", help="Where the first run begins: earliest, latest, or a time."),
]
Once = Annotated[
    bool,
    typer.Option("--once", help="Process the messages stored now, and exit. Default: continue."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Directory where the pipeline stores its progress, to continue from there.",
    ),
]


def seconds(option: str, text: str) -> float:
    """Parse the duration of an option, such as 10s or 1h, to seconds."""
    return duration_ns(option, text) / NS_PER_SECOND


def duration_ns(option: str, text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ClientFault(f"{option} {text!r}: {error}") from None


@contextmanager
def needs_spark() -> Iterator[None]:
    """Turn a failed import of an optional package into a ClientFault that says what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ClientFault(
            f"pipelines need Spark, and {error.name} is not here: pip install '.[spark]'"
        ) from None


def spark_settings(conf: Sequence[str] | None) -> dict[str, str]:
    """Parse the values of --conf."""
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
    """Open a session as the options say. ClientFault without the extra `spark`.

    Connects to `broker` first: an unreachable broker is reported before Spark starts, which takes long.
    """
    settings = spark_settings(conf)
    with needs_spark():
        from runnel.spark.runtime.session import session, settings_elsewhere

    if broker is not None and not master.startswith(_CONNECT):
        run_connected(broker, _nothing)
    quiet_failures()
    if not master.startswith(_CONNECT) and _WAREHOUSE not in settings_elsewhere():
        # Spark creates this directory, by default in the current one, as soon as a table is named. Nothing is
        # written there.
        settings.setdefault(_WAREHOUSE, str(Path(tempfile.gettempdir()) / "runnel-spark-warehouse"))
    typer.echo("starting Spark", err=True)
    _quiet_interrupts()
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with filtered_stderr():
            return session(f"runnel {app}", master, settings)
    finally:
        # Spark's own handler calls Java during any call to Java that is in progress, and both fail.
        signal.signal(signal.SIGINT, on_interrupt)


async def _nothing(_: Bus) -> None:
    pass


def quiet_failures() -> None:
    """Turn off Spark's traces, unless the user asked for them: the command explains its failure in one sentence."""
    os.environ.setdefault(_TRACES, "off")


def _quiet_interrupts() -> None:
    """Silence PySpark's tracebacks about calls and connections that Ctrl-C ends."""
    from pyspark import accumulators

    # py4j, which connects Python and Java, logs under its own name and directly to the root logger.
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: record.name.partition(".")[0] not in ("py4j", "root"))
    logging.root.addHandler(handler)
    for server in (accumulators.AccumulatorTCPServer, accumulators.AccumulatorUnixServer):
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
