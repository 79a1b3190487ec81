"""`cluster.sqlite` read without its brokers, verified, backed up, restored and damaged."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from runnel.errors import ClientFault, CorruptionError, FormatVersionError
from runnel.log.backup import checkpoint, copies
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import ShardId
from runnel.log.reading import OfflineLog, verify
from tests.log.cluster_home import ClusterHome, fill, in_home, known, until
from tests.log.samples import one, read_all


def database_of(home: ClusterHome) -> Path:
    return Path(home.directory, "cluster.sqlite")


def damage_of(home: ClusterHome) -> Sequence[object]:
    return verify(OfflineLog(home.directory)).damage


async def shared(home: ClusterHome) -> set[str]:
    """Make a directory that several logs have served. Returns its metadata."""
    parent = await home.parent()
    log = await home.node("node-1")
    shards = {shard for topic in ("a", "wide", "gone", "again") for shard in shards_of(log, topic)}
    for shard in shards:
        await log.acquire(shard)
    await fill(log)
    content = known(log)
    await home.end(log)
    await parent.close()
    return content


def shards_of(log: DiskLog, topic: str) -> list[ShardId]:
    policy = log._policies.for_topic(topic)
    return list(log.metadata.topics.shards_for(topic, policy))


# --- Read without a broker ---


@in_home
async def test_topics_and_messages_are_read_without_a_broker(home: ClusterHome) -> None:
    await shared(home)
    log = OfflineLog(home.directory)
    assert {"a", "wide", "gone", "again"} == log.catalogued.topics.keys()
    assert [cursor.name for cursor in log.cursors()] == ["c"]
    payloads = [bytes(message.payload) for batch in log.scan() for message in batch.messages()]
    assert sorted(payloads) == [b"in a", b"in again", b"in wide"]  # purged ones are not served
    assert log.report.damage == []
    assert damage_of(home) == []
    assert [path.name for path in database_of(home).parent.glob("cluster.sqlite*")] == [
        "cluster.sqlite"
    ]  # nothing was written beside it


@in_home
async def test_topics_are_read_beside_brokers(home: ClusterHome) -> None:
    await home.parent()
    first, second = await home.node("first"), await home.node("second")
    for number in range(20):
        await (first, second)[number % 2].metadata.ensure_topic(f"t/{number}")
        names = OfflineLog(home.directory).catalogued.topics.keys()
        assert f"t/{number}" in names
        assert len(names) == number + 1
    assert damage_of(home) == []


@in_home
async def test_file_of_brokers_that_were_killed_is_read_with_its_log(home: ClusterHome) -> None:
    await home.parent()
    node = await home.node("node-1")
    await node.metadata.ensure_topic("a")
    killed = home.directory + ".killed"
    home.disk.make_directory(killed)
    for name in ("cluster.sqlite", "cluster.sqlite-wal", "runnel.json", "synced"):
        shutil.copy(f"{home.directory}/{name}", killed)
    assert OfflineLog(killed).catalogued.topics.keys() == {"a"}


# --- Backups ---


@in_home
async def test_backup_of_a_single_log_has_the_metadata_as_of_one_moment(home: ClusterHome) -> None:
    await shared(home)
    log = await home.alone()
    before = known(log)
    path, _ = await log.checkpoint()
    await log.metadata.ensure_topic("later")
    target = Path(home.directory + ".backup")
    with copies.new_copy(target) as unfinished:
        copies.copy_files(Path(path), unfinished, list(checkpoint.files_of(Path(path))))
    await log.drop_checkpoint()
    await log.close()
    assert verify(OfflineLog(str(target))).damage == []
    copies.begin_epoch(home.disk, target)
    original, home.directory = home.directory, str(target)
    restored = await home.alone()
    assert known(restored) == before
    epochs = [restored.shard(shard).epoch for shard in restored.shards()]
    await restored.close()
    home.directory = original
    log = await home.alone()
    assert min(epochs) > max(log.shard(shard).epoch for shard in log.shards())


@in_home
async def test_backup_beside_several_brokers_is_refused(home: ClusterHome) -> None:
    await home.parent()
    with pytest.raises(ClientFault, match="several brokers serve"):
        await (await home.node("first")).checkpoint()


@in_home
async def test_copy_of_brokers_that_were_killed_is_whole(home: ClusterHome) -> None:
    parent = await home.parent()
    node = await home.node("node-1")
    await node.metadata.ensure_topic("a")
    await node.metadata.set_subscription("s", b"definition")
    content = known(node)
    target = Path(home.directory + ".copy")
    with copies.new_copy(target) as unfinished:
        copies.copy_files(Path(home.directory), unfinished, copies.files_of(Path(home.directory)))
    await home.end(node)
    parent.release()
    assert "cluster.sqlite-shm" not in home.disk.list(str(target))
    copies.begin_epoch(home.disk, target)
    home.directory = str(target)
    log = await home.alone()
    assert known(log) == content


# --- Damage ---


def change(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


@in_home
async def test_damaged_record_is_told_and_mended_and_others_stay(home: ClusterHome) -> None:
    content = await shared(home)
    change(
        database_of(home),
        "UPDATE record SET content = CAST(x'00' || substr(content, 2) AS BLOB) WHERE kind = 'topic' AND name = 'a'",
    )
    [damage] = damage_of(home)
    assert "topic 'a' cannot be read" in str(damage)
    with pytest.raises(KeyError):
        _ = OfflineLog(home.directory).catalogued.topics["a"]
    log = await home.alone()
    assert any("topic 'a'" in told for told in log.recovered.damage)
    # Its shard knows the topic.
    assert [bytes(message.payload) for message in await read_all(log, "a")] == [b"in a"]
    assert {text for text in known(log) if "'a'" not in text} == {
        text for text in content if "'a'" not in text
    }
    await log.close()
    assert damage_of(home) == []
    log = await home.alone()
    assert log.recovered.damage == []


@in_home
async def test_damaged_record_stops_one_of_several_logs(home: ClusterHome) -> None:
    await shared(home)
    await home.parent()
    change(
        database_of(home), "UPDATE record SET content = x'0102030405' WHERE kind = 'subscription'"
    )
    with pytest.raises(CorruptionError, match=r"subscription 's' cannot be read.*restore a backup"):
        await home.node("node-1")


@in_home
async def test_damaged_file_is_refused_with_what_to_do(home: ClusterHome) -> None:
    await shared(home)
    path = database_of(home)
    content = bytearray(path.read_bytes())
    for begin in range(4096, len(content), 4096):
        content[begin : begin + 64] = bytes(64)
    path.write_bytes(content)
    for opening in (home.alone, home.parent):
        with pytest.raises(CorruptionError, match=r"restore a backup.*move the file away"):
            await opening()
    assert any("cluster.sqlite" in str(damage) for damage in damage_of(home))


@in_home
async def test_file_that_is_none_of_sqlite_is_refused(home: ClusterHome) -> None:
    await shared(home)
    database_of(home).write_bytes(b"no database at all" * 1000)
    with pytest.raises(CorruptionError, match="restore a backup"):
        await home.alone()
    [damage] = damage_of(home)
    assert "not a database" in str(damage)


@in_home
async def test_file_of_a_newer_runnel_is_refused(home: ClusterHome) -> None:
    await shared(home)
    change(database_of(home), "PRAGMA user_version = 99")
    with pytest.raises(FormatVersionError, match="tables of version 99"):
        await home.alone()
    with pytest.raises(FormatVersionError):
        _ = OfflineLog(home.directory).catalogued


@in_home
async def test_topics_are_found_again_without_the_file(home: ClusterHome) -> None:
    """What the remedy in the error says."""
    await shared(home)
    database_of(home).unlink()
    assert any("missing, with all metadata" in str(damage) for damage in damage_of(home))
    parent = await home.parent()
    assert any("missing, with all metadata" in told for told in parent.recovered.damage)
    log = await home.node("node-1")
    for topic in ("a", "again", "wide"):
        assert log.metadata.topics.has(topic)
        await log.acquire(log.metadata.topics.shard_of(topic, 0))
    assert [bytes(message.payload) for message in await read_all(log, "a")] == [b"in a"]
    assert log.metadata.subscriptions() == {}
    await log.append(one("a", b"goes on"))


@in_home
async def test_damage_that_appears_while_it_is_in_use_is_told_to_callers(home: ClusterHome) -> None:
    await home.parent()
    first, second = await home.node("first"), await home.node("second")
    await first.metadata.ensure_topic("a")
    await until(lambda: second.metadata.topics.has("a"))
    change(database_of(home), "INSERT INTO record VALUES ('topic', 'b', 1, x'00')")
    await first.metadata.set_subscription("s", b"1")  # other records are well
    with pytest.raises(CorruptionError, match="topic 'b' cannot be read"):
        await second.metadata.ensure_topic("b")
