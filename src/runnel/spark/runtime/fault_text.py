"""Removes the Python worker's traceback from Spark's exception for a user's mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from runnel.errors import ClientFault

# PySpark reads this variable when it reports the exception that ends a worker.
_HIDE_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
# Workers that only serve a data source. They run no function of the user, so no useful traceback is lost.
_WORKERS: Final = "pyspark.sql.worker."


@contextmanager
def faults_without_trace() -> Iterator[None]:
    """Spark reports a ClientFault raised inside without a traceback. Other errors keep theirs."""
    try:
        yield
    except ClientFault:
        if _serves_a_source_alone():
            os.environ[_HIDE_TRACEBACK] = "1"
        raise


def _serves_a_source_alone() -> bool:
    """Whether this worker only serves a data source: only such workers and their daemon load these modules."""
    return any(name.startswith(_WORKERS) for name in list(sys.modules))
