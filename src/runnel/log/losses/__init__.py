"""What a shard has lost for good: remembered in a file, found when a data directory is opened, told to readers."""
