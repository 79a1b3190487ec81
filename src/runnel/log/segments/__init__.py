"""The files of one shard: segments of blocks with their index, found, checked, opened and read. Read `segments.py` first."""

__all__ = ["files", "index", "paths", "records", "scan", "segment", "segments", "synced_marks"]
