"""Stored messages. The broker uses `log.py` alone; then read `disk_log.py`, `shard.py`, `writer.py` and `reader.py`.

log.py          the interfaces of every store: message log, owned shard, metadata, upkeep, ownership
values.py       the values that they take and return, which log.py exports
shard_view.py   the owned shard of both stores
group_store.py  what makes a shard's batches durable, and how that may end
disk/           the log in a data directory: shards that write, sync, read and recover
memory/         the same promises without files
segments/       the files of a shard, and the judgement of what is whole after a crash
metadata/       what outlives segments: topics, offsets, cursors, subscriptions, producers, last values
retention/      which messages may be removed
losses/         what a shard has lost for good
backup/         consistent copies of a data directory
reading/        the same files, read without a broker
"""

__all__ = ["backup", "disk", "log", "memory", "metadata", "reading", "retention", "segments"]
