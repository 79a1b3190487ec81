"""A SPARK_HOME whose workers find the installed PySpark, with its bytecode.

Spark puts a zip of PySpark first on the path of every Python it starts. The zip has no bytecode, so each daemon,
planner and stream compiles PySpark again, for a second or longer. This home consists of links to the real one, without
the zip. Its workers use the installed PySpark, which is the same, because pip installed both.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyspark

from runnel.spark.runtime.java import cache_directory

_VARIABLE: Final = "SPARK_HOME"
_WITH_ZIP: Final = "python"


@contextmanager
def quick_home() -> Iterator[None]:
    """Set this home while Java starts; all processes that Java starts later have it too. Does nothing if impossible."""
    home = None if _VARIABLE in os.environ else linked_home(os.environ)
    if home is None:
        yield
        return
    os.environ[_VARIABLE] = str(home)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]


def linked_home(environment: Mapping[str, str]) -> Path | None:
    """Make the home in the user's cache; None if PySpark is not where every Python of this installation looks."""
    installed = Path(pyspark.__file__).parent
    if str(installed.parent) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return None
    linked = sorted(path for path in installed.iterdir() if path.name != _WITH_ZIP)
    # Named by content: a newer PySpark, or one with a directory of settings, gets its own home.
    content = f"{pyspark.__version__} {linked}".encode()
    home = cache_directory(environment) / f"spark-{hashlib.sha256(content).hexdigest()[:16]}"
    if home.is_dir():
        return home
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as temporary:
            made = Path(temporary, "home")
            made.mkdir()
            for path in linked:
                (made / path.name).symlink_to(path)
            made.rename(home)  # atomic, because another process may be doing the same
    except OSError:
        return home if home.is_dir() else None
    return home
