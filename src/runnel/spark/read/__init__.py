"""Reads topics from Spark, in batches and streams. Read `batch_reader.py` and `stream_reader.py` first."""

__all__ = [
    "batch_reader",
    "columns",
    "query_cursor",
    "ranges",
    "schema",
    "stream_offset",
    "stream_reader",
]
