"""Journals with several shards: their number is kept, whatever is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import msgspec
import pytest

from runnel.config import Rotate, TopicRule
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import ShardId
from runnel.log.reading import OfflineLog, verify
from runnel.topics.partitions import shard_of_partition
from tests.log.home import LOG, Home, run
from tests.log.images import flipped
from tests.log.samples import one, read_payloads

SHARDS = 4
RULE = TopicRule(match="*", partitions=2, journal="main", rotate=Rotate(bytes_max=2000))
TOPICS = tuple(f"topic{number}" for number in range(6))
COUNT_FILE = "data/journals/main/shards"


def home(shards: int = SHARDS, *rules: TopicRule) -> Home:
    return Home(*(rules or (RULE,)), log=msgspec.structs.replace(LOG, journal_shards=shards))


def set_shards(at: Home, shards: int) -> None:
    log = msgspec.structs.replace(at.settings.log, journal_shards=shards)
    at.settings = msgspec.structs.replace(at.settings, log=log)


async def publish(log: DiskLog, text: str = "first") -> None:
    for topic in TOPICS:
        for partition in range(2):
            await log.append(one(topic, text.encode(), partition=partition))


async def stored(log: DiskLog) -> dict[tuple[str, int], list[bytes]]:
    found: dict[tuple[str, int], list[bytes]] = {}
    for topic in TOPICS:
        for partition in range(2):
            page = await log.read(topic, partition, 1)
            found[topic, partition] = read_payloads(page)
    return found


def every(*texts: str) -> dict[tuple[str, int], list[bytes]]:
    payloads = [text.encode() for text in texts]
    return {(topic, partition): payloads for topic in TOPICS for partition in range(2)}


def check_shards(log: DiskLog, shards: int) -> None:
    for topic in TOPICS:
        expected = [ShardId("main", shard_of_partition(topic, part, shards)) for part in range(2)]
        assert log.metadata.topics.get(topic).shards == expected


def test_topics_of_a_journal_are_stored_in_several_shards() -> None:
    async def scenario() -> None:
        at = home()
        log = await at.open()
        await publish(log)
        used = {shard_of_partition(topic, part, SHARDS) for topic in TOPICS for part in range(2)}
        assert used == {0, 1, 2, 3}
        assert set(log.shards()) == {ShardId("main", shard) for shard in used}
        log = await at.reopen(log)
        check_shards(log, SHARDS)
        log = await at.kill()
        assert await stored(log) == every("first")
        assert log.recovered.damage == []
        await log.close()

    run(scenario)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 16), (1, 4)])
def test_journal_keeps_its_shards_when_the_setting_changes(before: int, after: int) -> None:
    async def scenario() -> None:
        at = home(before)
        log = await at.open()
        await publish(log)
        set_shards(at, after)
        log = await at.reopen(log)
        check_shards(log, before)
        await publish(log, "second")
        assert await stored(log) == every("first", "second")
        log = await at.kill()
        check_shards(log, before)
        assert await stored(log) == every("first", "second")
        await log.close()

    run(scenario)


def test_journal_that_a_template_names_has_one_shard_and_no_file_for_it() -> None:
    async def scenario() -> None:
        at = home(SHARDS, TopicRule(match="*", partitions=2, journal="{topic}"))
        log = await at.open()
        await publish(log)
        assert {shard.shard for shard in log.shards()} == {0}
        assert "shards" not in at.disk.list("data/journals/topic0")
        await log.close()

    run(scenario)


def lose_count(at: Home) -> None:
    at.disk.remove(COUNT_FILE)


def damage_count(at: Home) -> None:
    at.overwrite(COUNT_FILE, flipped(at.content(COUNT_FILE), 0, 0))


def lose_metadata(at: Home) -> None:
    for path in at.metadata_files():
        at.disk.remove(path)


def damage_first_record(at: Home) -> None:
    """The journal's record is among the first ones."""
    for path in at.metadata_files():
        content = at.content(path)
        place = content.index(b"journal")
        at.overwrite(path, flipped(content, place, 0))


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize(
    "losses",
    [
        (lose_count,),
        (damage_count,),
        (lose_metadata,),
        (damage_first_record,),
        (lose_metadata, lose_count),
        (lose_metadata, damage_count),
        (damage_first_record, lose_count),
    ],
    ids=lambda losses: "+".join(loss.__name__ for loss in losses),
)
@pytest.mark.parametrize("setting", [1, 16])
def test_topics_stay_in_their_shards_whatever_is_lost(
    losses: tuple[Callable[[Home], None], ...], setting: int, *, is_closed: bool
) -> None:
    async def scenario() -> None:
        at = home()
        log = await at.open()
        for number in range(20):
            await publish(log, str(number))
        if is_closed:
            await log.close()
        at.disk = at.disk.restart()
        for lose in losses:
            lose(at)
        set_shards(at, setting)
        log = await at.open()
        check_shards(log, SHARDS)
        assert log.recovered.damage != []
        await publish(log, "more")
        expected = every(*map(str, range(20)), "more")
        assert await stored(log) == expected
        log = await at.reopen(log)
        check_shards(log, SHARDS)
        assert await stored(log) == expected
        assert log.recovered.damage == []
        await log.close()

    run(scenario)


def test_every_flipped_bit_of_the_count_is_told_and_mended() -> None:
    async def scenario() -> None:
        at = home()
        log = await at.open()
        await publish(log)
        await log.close()
        whole = at.content(COUNT_FILE)
        random = Random(1)
        for position in range(len(whole)):
            at.overwrite(COUNT_FILE, flipped(whole, position, random.randrange(8)))
            log = await at.open()
            check_shards(log, SHARDS)
            assert [told for told in log.recovered.damage if told.startswith(COUNT_FILE)]
            await publish(log, "more")
            await log.close()

    run(scenario)


def test_machine_dies_while_a_journal_is_begun() -> None:
    async def one(seed: int) -> None:
        at = home()
        at._random = Random(seed)
        log = await at.open()
        waiting = [asyncio.ensure_future(publish(log, str(each))) for each in range(2)]
        for _ in range(seed * 3):
            await asyncio.sleep(0)
        is_done = [each for each in waiting if each.done()]
        log = await at.crash()
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        set_shards(at, 1)
        if "main" in at.disk.list("data/journals"):
            assert log.recovered.damage == []
        if is_done:
            check_shards(log, SHARDS)
        await publish(log, "after")
        assert all(found[-1] == b"after" for found in (await stored(log)).values())
        await log.close()

    for seed in range(40):
        asyncio.run(one(seed))


@pytest.mark.parametrize("lose", [lose_count, damage_count])
def test_readers_of_the_files_read_all_shards_and_tell_of_a_count_that_is_lost(
    lose: Callable[[Home], None],
) -> None:
    async def scenario() -> None:
        at = home()
        log = await at.open()
        await publish(log)
        await log.close()
        offline = OfflineLog("data", disk=at.disk, find_holder=lambda _: None)
        found = sorted((m.topic, m.partition) for each in offline.scan() for m in each.messages())
        assert found == sorted(every("first"))
        assert not verify(OfflineLog("data", disk=at.disk, find_holder=lambda _: None)).damage
        (journal,) = offline.journals()
        assert journal.shards == (0, 1, 2, 3)
        lose(at)
        (told,) = verify(OfflineLog("data", disk=at.disk, find_holder=lambda _: None)).damage
        assert str(told).startswith(COUNT_FILE)

    run(scenario)
