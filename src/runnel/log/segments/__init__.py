"""The files of one shard: segments of blocks with their index, found, checked, opened and read."""
