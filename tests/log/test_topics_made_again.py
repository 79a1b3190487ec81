"""Topics that are deleted and made again: what is stored stays, what was deleted stays hidden."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from runnel.config import LogSettings, TopicRule
from runnel.log.log import OffsetBounds
from runnel.log.segments import paths
from tests.log.home import Home, run
from tests.log.images import payloads
from tests.log.samples import one

PLAIN = LogSettings(allocate_bytes=0, disk_reserve_bytes=0)


def test_topic_made_again_in_a_shard_without_files_keeps_its_messages() -> None:
    """The shard begins with the record that the topic is another one: without it, a start would hide its messages."""
    split = TopicRule(match="*", journal="main", partitions=4)
    home = Home(split, log=msgspec.structs.replace(PLAIN, journal_shards=4))

    async def scenario() -> None:
        log = await home.open()
        shards = (await log.metadata.ensure_topic("a")).shards
        assert len(set(shards)) > 1
        await log.metadata.delete_topic("a")
        log = await home.reopen(log)
        await log.metadata.ensure_topic("a")
        for partition in range(4):
            await log.append(one("a", b"1", partition=partition))
        for again in (home.kill(), home.kill()):
            log = await again
            for partition in range(4):
                assert await log.bounds("a", partition) == OffsetBounds(1, 2)
        await log.close()

    run(scenario)


def test_folder_lost_with_a_topic_that_was_made_again_does_not_hide_what_comes_later() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        await log.metadata.delete_topic("a")
        await log.append(one("a", b"2"))
        await log.close()
        folder = paths.shard_folder(home.directory, "main", 0)
        for path in [*home.catalogue_files(), *home.shard_files(""), f"{folder}/catalogue", folder]:
            with suppress(OSError):
                home.disk.remove(path)
        home.disk.remove(f"{home.directory}/{paths.MARKS_FILE}")
        log = await home.open()
        await log.append(one("a", b"3"))
        before = await payloads(log, "a")
        assert list(before.values()) == [b"3"]
        log = await home.reopen(log)
        assert await payloads(log, "a") == before
        await log.close()

    run(scenario)


def test_numbers_of_a_batch_that_was_lost_with_its_new_topic_are_not_skipped() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        await log.append(one("b", b"1"))
        await log.metadata.delete_topic("a")
        operations = len(home.disk.operations)
        lost = asyncio.ensure_future(log.append(one("a", b"lost", b"lost")))
        while not any(  # noqa: ASYNC110 - what is waited for is the disk's doing
            "/catalogue/" in each.path for each in home.disk.operations[operations:]
        ):
            await asyncio.sleep(0)
        log = await home.kill()
        assert not lost.done()
        lost.cancel()
        assert (await log.append(one("a", b"2"))).base_offsets == [2]
        assert await payloads(log, "a") == {2: b"2"}
        await log.close()

    run(scenario)


def test_topic_deleted_while_it_is_being_made_again_stays_deleted() -> None:
    home = Home(log=PLAIN)

    async def scenario() -> None:
        log = await home.open()
        await log.append(one("a", b"1"))
        await log.metadata.delete_topic("a")
        stored = log.append(one("a", b"2"))
        await log.metadata.delete_topic("a")
        await stored
        log = await home.reopen(log)
        assert log.metadata.topics.find("a") is None
        assert (await log.append(one("a", b"3"))).base_offsets == [3]
        assert await payloads(log, "a") == {3: b"3"}
        await log.close()

    run(scenario)
