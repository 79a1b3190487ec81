"""The flags that pipelines share, and the Spark session that they ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from runnel.errors import ClientFault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER: Final = "local[*]"

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
Checkpoint = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Where the pipeline keeps how far it is, to go on from there."
    ),
]


@contextmanager
def needs_spark() -> Iterator[None]:
    """For imports of what the extra `spark` brings."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ClientFault(
            f"pipelines need Spark, and {error.name} is not here: pip install 'runnel[spark]'"
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


def open_session(app: str, master: str, conf: Sequence[str] | None) -> SparkSession:
    """A session as the flags say. ClientFault without the extra `spark`."""
    settings = spark_settings(conf)
    with needs_spark():
        from runnel.spark.session import session

    return session(f"runnel {app}", master, settings)
