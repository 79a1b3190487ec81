"""A SPARK_HOME whose workers find PySpark where it is installed, with its bytecode.

Spark puts a zip of PySpark first on the path of every Python it starts, and there is no bytecode in that: each daemon,
planner and stream compiles PySpark anew, for a second or longer. A home without the zip, which otherwise is made of
links to the real one, leaves them the installed PySpark: that very one, since it is the home that pip brought.
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
    """For as long as Java starts, and for all that Java starts later; nothing changes where that cannot be had."""
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
    """That home, in the user's cache; None if PySpark is not where every Python of this installation looks."""
    installed = Path(pyspark.__file__).parent
    if str(installed.parent) not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return None
    linked = sorted(path for path in installed.iterdir() if path.name != _WITH_ZIP)
    # By content: a newer PySpark gets its own, and one that was given a directory of settings.
    told = f"{pyspark.__version__} {linked}".encode()
    home = cache_directory(environment) / f"spark-{hashlib.sha256(told).hexdigest()[:16]}"
    if home.is_dir():
        return home
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as temporary:
            made = Path(temporary, "home")
            made.mkdir()
            for path in linked:
                (made / path.name).symlink_to(path)
            made.rename(home)  # at once: another process may be doing the same
    except OSError:
        return home if home.is_dir() else None
    return home
