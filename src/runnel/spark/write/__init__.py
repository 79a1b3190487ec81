"""Writes rows to topics from Spark, each once. Read `writer.py` first."""

__all__ = ["chunks", "task_publisher", "writer"]
