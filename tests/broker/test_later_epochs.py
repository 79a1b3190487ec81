"""Positions of a later epoch than the shard's: of a past that was lost, or the shard has moved away unnoticed."""

from __future__ import annotations

import pytest

from runnel.broker.shard_fetcher import ShardFetchRequest
from runnel.config import TopicRule
from runnel.errors import OffsetGoneError, Unavailable
from runnel.formats.wire import PartitionPlace, ShardPlace, Start
from runnel.log.disk.disk_log import DiskLog
from runnel.log.log import ShardId
from runnel.log.memory import MemoryLog
from tests.broker.scenes import At, Reader, Scene, Store, scene

MAIN = ShardId("main")
RULE = TopicRule(match="*", journal="main")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ShardId]:
    """The stores do not know whether a shard is still theirs. Each question is noted."""
    questions: list[ShardId] = []

    async def unknown(log: object, shard: ShardId) -> bool:
        questions.append(shard)
        return False

    for store in (DiskLog, MemoryLog):
        monkeypatch.setattr(store, "is_still_mine", unknown)
    return questions


def requests(epoch: int) -> list[Start | ShardFetchRequest]:
    """The same position in every way to give one."""
    return [
        Start("resume", shards=[ShardPlace("main", 0, epoch, 2)]),
        Start("resume_last", shards=[ShardPlace("main", 0, epoch, 2)]),
        Start("resume", [PartitionPlace("a", 0, 2, epoch)]),
        ShardFetchRequest(MAIN, 2, epoch=epoch),
    ]


async def give(at: At, request: Start | ShardFetchRequest) -> None:
    if isinstance(request, ShardFetchRequest):
        await at.broker.fetch_shard(request)
    else:
        await begin(at, request)


async def begin(at: At, start: Start) -> Reader:
    reader, subscription = await at.subscribe("a" if start.partitions else "*", start=start)
    await at.settle(subscription)
    return reader


async def epoch_of(at: At) -> int:
    await at.publish("a", b"1")
    await at.publish("a", b"2")
    return at.broker.routes(["a"])[0].owners[0].epoch


def in_both(run: Scene) -> None:
    for store in Store:
        scene(RULE)(run)(store, "")


def test_it_is_unavailable_while_the_shard_may_be_another_brokers(asked: list[ShardId]) -> None:
    async def run(at: At) -> None:
        epoch = await epoch_of(at)
        for number, request in enumerate(requests(epoch + 1), 1):
            with pytest.raises(
                Unavailable, match=f"shard main/0: the position is of epoch {epoch + 1}"
            ):
                await give(at, request)
            assert len(asked) == number
        asked.clear()

    in_both(run)


def test_nothing_is_asked_for_positions_of_this_epoch_or_before(asked: list[ShardId]) -> None:
    async def run(at: At) -> None:
        epoch = await epoch_of(at)
        for known in (epoch, 0):
            for request in requests(known):
                await give(at, request)
        assert asked == []

    in_both(run)


def test_it_is_of_a_lost_past_if_the_shard_is_still_ours() -> None:
    """On disk the position still names the same message. In memory the reader gets a gap, and all there is."""

    async def run(at: At) -> None:
        epoch = await epoch_of(at)
        for request in requests(epoch + 1):
            if isinstance(request, Start):
                reader = await begin(at, request)
                is_lost = at.store is Store.MEMORY
                assert reader.payloads() == ([b"1", b"2"] if is_lost else [b"2"])
                assert [gap.reason for gap in reader.gaps] == ["restart"] * is_lost
            elif at.store is Store.MEMORY:
                with pytest.raises(OffsetGoneError):
                    await at.broker.fetch_shard(request)
            else:
                assert (await at.broker.fetch_shard(request)).messages == 1

    in_both(run)
