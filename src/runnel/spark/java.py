"""Deprecated name of `runnel.spark.runtime.java`, kept for scripts that import `find_java` from here."""

from runnel.spark.runtime.java import find_java

__all__ = ["find_java"]
