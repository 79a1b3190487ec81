"""Restores the number of shards of a journal found on disk.

The metadata records it, and the journal's folder has it in a file. If both are lost, the segments tell which
topic-partitions lie in which shard: the lowest number that fits is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from runnel.log.disk.recovery import FoundShard
from runnel.log.metadata.topic_table import TopicTable
from runnel.log.segments import paths
from runnel.log.segments.scan import Damage
from runnel.log.segments.shards_file import read_shards, write_shards
from runnel.platform.disk import Disk
from runnel.topics.partitions import fewest_shards


def restore_shard_count(
    disk: Disk, topics: TopicTable, journal: str, folder: str, found: Sequence[FoundShard]
) -> Damage | None:
    """Set the journal's number of shards in the table of topics, and mend its file. Runs in a worker.

    Returns what was damaged in the folder. Unless the metadata knows the number, the caller has to record it again.
    """
    path = f"{folder}/{paths.SHARDS_FILE}"
    recorded = topics.shard_count(journal) or 1
    written = read_shards(disk, folder)
    if recorded > 1:
        if written == recorded or not found:
            return None
        _mend(disk, folder, recorded)
        return Damage(path, 0, 0, f"does not say that the journal has {recorded} shards")
    if written is not None:
        topics.restore_journal(journal, written)
        return None
    has_file = paths.SHARDS_FILE in disk.list(folder)
    highest = max((each.id.shard for each in found), default=0)
    if not highest and not has_file:
        if found:
            topics.restore_journal(journal, 1)
        return None
    fitting = fewest_shards(_places(found), highest + 1) or highest + 1
    topics.restore_journal(journal, fitting)
    _mend(disk, folder, fitting)
    problem = "damaged" if has_file else "missing"
    return Damage(path, 0, 0, f"{problem}; the journal is read as one with {fitting} shards")


def _mend(disk: Disk, folder: str, shards: int) -> None:
    with suppress(OSError):  # then the next start finds it damaged again
        write_shards(disk, folder, shards)
        disk.sync_directory(folder)


def _places(found: Sequence[FoundShard]) -> Iterator[tuple[str, int, int]]:
    """Each topic-partition in the segments, with its shard."""
    for each in found:
        for item in each.opened:
            index = item.segment.growing or each.folder.resume_index(item.segment)
            for topic, partition in index.keys():  # noqa: SIM118 - not a dict
                yield topic, partition, each.id.shard
