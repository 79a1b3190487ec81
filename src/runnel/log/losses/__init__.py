"""What a shard has lost for good: found when a directory is opened, kept in a file, reported to readers."""

__all__ = ["missing_segments", "shard_losses"]
