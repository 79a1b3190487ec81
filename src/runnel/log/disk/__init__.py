"""The log on disk: shards that write, sync, read and recover."""
