"""How a user's mistake reads in Spark's exception: its sentence first, and no traceback of a Python worker above it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from runnel.errors import ClientFault

# PySpark looks at this variable when it reports the exception that ends a worker.
_HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
# Workers that serve a data source alone: no function of a user runs in them, whose traceback would be missed.
_WORKERS: Final = "pyspark.sql.worker."


@contextmanager
def faults_without_trace() -> Iterator[None]:
    """A ClientFault that leaves it is reported by its sentence alone. Other errors keep their traceback."""
    try:
        yield
    except ClientFault:
        if _serves_a_source_alone():
            os.environ[_HIDE_TRACEBACK] = "1"
        raise


def _serves_a_source_alone() -> bool:
    """Only such workers have these modules: as their program, or imported by it or by Spark's daemon."""
    return any(name.startswith(_WORKERS) for name in list(sys.modules))
