"""Deprecated name of `runnel.spark.runtime.executor_package`, kept for programs that import `ship` from here."""

from runnel.spark.runtime.executor_package import ship

__all__ = ["ship"]
