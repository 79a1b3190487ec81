"""Executors of a cluster whose Python has not got Runnel: it is sent to them, as Spark sends a user's own modules."""

from __future__ import annotations

import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from runnel.errors import ClientFault

_OURS: Final = ("runnel", "pyspark_runnel")
# Compiled code cannot be sent: it has to be there.
_OTHERS: Final = ("fastcrc", "lz4", "msgspec", "numpy", "pyarrow", "xxhash", "zstandard")


def ship(spark: SparkSession, directory: Path) -> None:
    """See what an executor has, and send what it lacks, packed into a file in `directory`."""

    def missing(_: int) -> list[str]:
        from importlib.util import find_spec

        return [name for name in (*_OURS, *_OTHERS) if find_spec(name) is None]

    lacking = spark.sparkContext.parallelize([0], 1).map(missing).first()
    if others := [name for name in lacking if name in _OTHERS]:
        raise ClientFault(
            f"the executors' Python has no {', '.join(others)}: install 'runnel[spark]' where Spark's workers run, "
            "or name a Python that has it with PYSPARK_PYTHON"
        )
    if lacking:
        from pyspark_runnel import DefaultSource

        spark.sparkContext.addPyFile(str(pack(directory)))
        # A format that Spark finds by itself is looked for without what was sent.
        spark.dataSource.register(DefaultSource)


def pack(directory: Path) -> Path:
    """Runnel, as it is here, in a zip file that Python can import from."""
    version = metadata.version("runnel")
    path = directory / f"runnel-{version}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _OURS:
            spec = find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            root = Path(spec.origin).parent
            for file in sorted(root.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    archive.write(file, f"{name}/{file.relative_to(root)}")
        # So that it knows its own version there.
        archive.writestr(
            f"runnel-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: runnel\nVersion: {version}\n",
        )
    return path
