"""The log in a data directory: shards that write, sync, read and recover. Read `disk_log.py` first."""

__all__ = ["cluster_directory", "disk_log", "recovery"]
