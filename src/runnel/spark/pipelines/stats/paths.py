"""The source options and the table's location of `stats`, as the driver sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from runnel.client.connection import parse_url
from runnel.spark.connections import default_url

_URI: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def source_options(
    *,
    topics: str | Sequence[str] | None,
    pattern: str | None,
    url: str | None,
    token: str | None,
    path: str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """The options of reading. They include the broker's URL, because executors may have another default."""
    if path is None:
        url = url or default_url()
        parse_url(url)
    options = {
        "topics": topics if isinstance(topics, str) or topics is None else ",".join(topics),
        "pattern": pattern,
        "path": None if path is None else os.fspath(path),
        "url": url,
        "token": token,
    }
    return {name: value for name, value in options.items() if value is not None}


def is_here(spark: object) -> bool:
    """Whether this program is the driver. With Spark Connect the driver has its own files and settings."""
    return isinstance(spark, SparkSession)


def is_file_path(spark: object, path: str) -> bool:
    """Whether it is a path on this machine."""
    return is_here(spark) and not _URI.match(path)


def table_location(spark: object, path: str | os.PathLike[str]) -> str:
    """A table's location, independent of the working directory."""
    text = os.fspath(path)
    return str(Path(text).absolute()) if is_file_path(spark, text) else text
