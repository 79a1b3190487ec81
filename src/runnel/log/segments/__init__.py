"""The files of one shard: segments of blocks, and their index. Read `segments.py` first."""

__all__ = [
    "files",
    "format_file",
    "index",
    "paths",
    "records",
    "scan",
    "segment",
    "segments",
    "shards_file",
    "synced_marks",
]
