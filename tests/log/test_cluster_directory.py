"""A data directory whose metadata is in SQLite: made, converted, served by several logs, and by one again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from runnel.errors import LockedError, SettingsError
from runnel.log.disk import cluster_directory
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import OffsetBounds, ShardId
from runnel.log.segments.format_file import FORMAT, SHARED_FORMAT, read_format
from tests.fakes.clock import NS_PER_SECOND
from tests.log import cut_short
from tests.log.cluster_home import ClusterHome, fill, in_home, known, until, with_journal_shards
from tests.log.samples import one, read_all


def format_of(home: ClusterHome) -> int:
    return read_format(home.disk, home.directory).format


@in_home
async def test_fresh_directory_is_made_for_several_logs(home: ClusterHome) -> None:
    parent = await home.parent()
    assert parent.recovered.was_clean
    assert format_of(home) == SHARED_FORMAT
    assert "metadata" not in home.disk.list(home.directory)
    first, second = await home.node("first"), await home.node("second")
    shards = (await first.metadata.ensure_topic("wide")).shards
    await until(lambda: second.metadata.topics.has("wide"))
    owned = list(dict.fromkeys(shards))
    assert len(owned) > 1
    await first.acquire(owned[0])
    for shard in owned[1:]:
        await second.acquire(shard)
    for partition, shard in enumerate(shards):
        log = first if shard == owned[0] else second
        assert (await log.append(one("wide", b"x", partition=partition))).base_offsets == [1]


@in_home
async def test_nothing_is_lost_between_one_log_and_several(home: ClusterHome) -> None:
    log = await home.alone()
    await fill(log)
    before = known(log)
    await log.close()
    assert format_of(home) == FORMAT
    parent = await home.parent()
    assert parent.recovered.was_clean
    assert parent.recovered.damage == []
    first, second = await home.node("first"), await home.node("second")
    assert known(first) == known(second) == before
    assert await payloads(second, "again", 2) == [b"in again"]
    await second.append(one("again", b"by several"))
    await first.metadata.set_subscription("t", b"new")
    await until(lambda: known(second) == known(first))
    after = known(first)
    for each in (first, second):
        await each.close()
    await parent.close()
    # One log again: the metadata stays in SQLite.
    log = await home.alone()
    assert log.recovered.was_clean
    assert log.recovered.damage == []
    assert known(log) == after
    assert await log.bounds("again", 0) == OffsetBounds(2, 4)
    await log.metadata.ensure_topic("by one")
    await log.metadata.remove_cursor("c")
    after = known(log)
    await log.close()
    assert format_of(home) == SHARED_FORMAT
    parent = await home.parent()
    first = await home.node("first")
    assert known(first) == after
    assert await payloads(first, "a") == [b"in a"]


async def payloads(log: DiskLog, topic: str, offset: int = 1) -> list[bytes]:
    """What a log reads of a topic once it owns its shard."""
    await log.acquire(log.metadata.topics.shard_of(topic, 0))
    return [bytes(message.payload) for message in await read_all(log, topic, offset)]


@in_home
async def test_journal_that_had_one_shard_keeps_it(home: ClusterHome) -> None:
    home.settings = with_journal_shards(1)
    log = await home.alone()
    await log.metadata.ensure_topic("a")
    await log.close()
    home.settings = with_journal_shards(16)
    await home.parent()
    first, second = await home.node("first"), await home.node("second")
    await first.metadata.ensure_topic("b")
    await until(lambda: second.metadata.topics.has("b"))
    for node in (first, second):
        assert node.metadata.topics.shard_of("b", 0) == ShardId("main", 0)
        assert len(node._topics.shards_of("main")) == 1
    await second.metadata.ensure_topic("wide")
    assert len(second._topics.shards_of("wide")) == 16


# --- Who may open it ---


@in_home
async def test_parent_keeps_others_out(home: ClusterHome) -> None:
    parent = await home.parent()
    for opening in (home.alone, home.parent):
        with pytest.raises(LockedError):
            await opening()
    await parent.close()
    await (await home.alone()).close()


@in_home
async def test_nodes_of_a_parent_that_died_keep_others_out(home: ClusterHome) -> None:
    parent = await home.parent()
    node = await home.node("node-1")
    await node.metadata.ensure_topic("a")
    parent.release()
    with pytest.raises(LockedError, match="node-1"):
        await home.alone()
    begun_ns = home.clock.monotonic_ns()
    opening = asyncio.create_task(home.parent())
    await until(lambda: home.moved_clock() and opening.done())
    assert (
        home.clock.monotonic_ns() - begun_ns >= 15 * NS_PER_SECOND
    )  # it has waited for the node's end
    with pytest.raises(LockedError, match="node-1"):
        await opening
    await node.close()
    assert (await home.alone()).metadata.topics.has("a")


@in_home
async def test_two_logs_of_one_name_cannot_be_open(home: ClusterHome) -> None:
    await home.parent()
    await home.node("node-1")
    with pytest.raises(LockedError):
        await home.node("node-1")


@in_home
async def test_directory_is_clean_only_after_an_orderly_end_of_the_parent(
    home: ClusterHome,
) -> None:
    parent = await home.parent()
    await parent.close()
    parent = await home.parent()
    assert parent.recovered.was_clean
    parent.release()
    parent = await home.parent()
    assert not parent.recovered.was_clean


@in_home
async def test_network_file_systems_are_refused_before_anything_is_written(
    home: ClusterHome,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_directory, "network_file_system", lambda _: "nfs4")
        with pytest.raises(SettingsError, match="nfs4"):
            await home.parent()
    assert not home.disk.list(home.directory)


# --- Crashes ---


@pytest.mark.slow
def test_conversion_may_be_killed_at_any_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", cut_short.__name__, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent.parent,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    formats = [int(line) for line in done.stdout.split()]
    assert formats == sorted(formats)  # the mark is the moment at which the other store counts
    assert formats.count(FORMAT) > 20
    assert formats.count(SHARED_FORMAT) > 5
