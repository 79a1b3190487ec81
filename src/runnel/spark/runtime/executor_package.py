"""Sends Runnel to executors whose Python does not have it, as Spark sends a user's own modules."""

from __future__ import annotations

import marshal
import shutil
import zipfile
from importlib import metadata
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, find_spec, source_hash
from pathlib import Path
from typing import Final

from pyspark import SparkFiles
from pyspark.sql import SparkSession

from runnel.errors import ClientFault

_OURS: Final = ("runnel", "pyspark_runnel")
# The process that plans a stream looks in this subdirectory of the files that were sent.
_OF_STREAMS: Final = "streaming_job"
# Compiled packages cannot be sent; they have to be installed.
_OTHERS: Final = ("fastcrc", "lz4", "msgspec", "numpy", "pyarrow", "xxhash", "zstandard")


def ship(spark: SparkSession) -> None:
    """Send this Runnel to the executors if they have none, or another version."""
    version = metadata.version("runnel")

    def lacks(_: int) -> list[str]:
        from importlib import metadata
        from importlib.util import find_spec

        lacking = [name for name in (*_OURS, *_OTHERS) if find_spec(name) is None]
        if not lacking and metadata.version("runnel") != version:
            lacking += _OURS
        return lacking

    lacking = spark.sparkContext.parallelize([0], 1).map(lacks).first()
    if others := [name for name in lacking if name in _OTHERS]:
        raise ClientFault(
            f"the executors' Python has no {', '.join(others)}: install '.[spark]' where Spark's workers run, "
            "or name a Python that has it with PYSPARK_PYTHON"
        )
    if lacking:
        from pyspark_runnel import DefaultSource

        sent = Path(SparkFiles.getRootDirectory())
        packed = pack(sent)
        spark.sparkContext.addPyFile(str(packed))
        for_streams = sent / _OF_STREAMS
        for_streams.mkdir(exist_ok=True)
        shutil.copy(packed, for_streams)
        # When Spark looks for a format by itself, it does not search the files that were sent.
        spark.dataSource.register(DefaultSource)


def pack(directory: Path) -> Path:
    """Pack this Runnel into a zip file that Python can import from."""
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
                    inside = f"{name}/{file.relative_to(root)}"
                    archive.write(file, inside)
                    if file.suffix == ".py":
                        archive.writestr(f"{inside}c", _compiled(file))
        # Lets Runnel find its own version there.
        archive.writestr(
            f"runnel-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: runnel\nVersion: {version}\n",
        )
    return path


def _compiled(module: Path) -> bytes:
    """The bytecode of a module. Without it, every new Python worker would compile the module again.

    It is marked as not to be compared with its source. Another version of Python ignores it.
    """
    code = SourceFileLoader(module.stem, str(module)).get_code(module.stem)
    is_by_hash_unchecked = (1).to_bytes(4, "little")
    return b"".join(
        (MAGIC_NUMBER, is_by_hash_unchecked, source_hash(module.read_bytes()), marshal.dumps(code))
    )
