"""Several logs serve one data directory, each of them other shards, and hand the shards to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import pytest

from runnel.config import LogSettings, Retain, Rotate, Settings, TopicRule
from runnel.errors import (
    ClientFault,
    MovedError,
    ProducerFault,
    Unavailable,
    UnknownTopicError,
)
from runnel.log.disk.disk_log import DiskLog
from runnel.log.group_store import BatchGroup
from runnel.log.log import CursorPosition, OffsetBounds, Position, ShardId
from runnel.log.metadata.shared_records import SharedRecords
from runnel.platform.disk import FileAccess
from runnel.topics.policies import Policies
from tests.fakes.clock import VirtualClock
from tests.fakes.disk import FakeDisk
from tests.fakes.lossy_store import Fate, lossy
from tests.fakes.workers import SimulatedWorkers
from tests.log.samples import batch, numbered, one, read_all, read_payloads

MAIN, OTHER = ShardId("main"), ShardId("other")
RULES = (
    TopicRule(match="b*", journal="other"),
    TopicRule(match="wide", journal="wide", partitions=4),
    TopicRule(
        match="last/*",
        journal="last",
        last_value=True,
        rotate=Rotate(bytes_max=1),
        retain=Retain(bytes_max=1),
    ),
    TopicRule(match="*", journal="main"),
)


Draw = Callable[[BatchGroup, bool], Fate]


class Place:
    """A data directory on a fake disk, with the metadata that its logs share."""

    def __init__(self, seed: int = 1, rules: Sequence[TopicRule] = RULES) -> None:
        self.random = Random(seed)
        self.disk = FakeDisk(self.random)
        self.rules = rules
        self.shared = SharedRecords()
        self.logs: list[DiskLog] = []

    async def make(self) -> None:
        """The first opening makes the directory: that is done by one log alone."""
        log = await self._open(None)
        self.shared.records += log._state.snapshot(0)
        await log.close()

    async def open(self, name: str, draw: Draw | None = None) -> DiskLog:
        """A log whose group stores lose answers as `draw` says."""
        if not self.disk.list("data"):
            await self.make()
        log = await self._open(name, draw=draw)
        self.logs.append(log)
        return log

    async def _open(
        self,
        name: str | None,
        rules: Sequence[TopicRule] | None = None,
        draw: Draw | None = None,
    ) -> DiskLog:
        log = LogSettings(
            allocate_bytes=0, disk_reserve_bytes=0, journal_shards=2, catalogue_log_bytes_max=1
        )
        workers = SimulatedWorkers(self.random)
        return await DiskLog.open(
            "data",
            settings=Settings(log=log),
            policies=Policies(rules or self.rules),
            disk=self.disk,
            clock=VirtualClock(),
            workers=workers,
            make_group_store=None if draw is None else lossy(workers, draw),
            shared=None if name is None else self.shared.member(name),
        )

    async def two(self) -> tuple[DiskLog, DiskLog]:
        return await self.open("first"), await self.open("second")

    async def close(self) -> None:
        for log in self.logs:
            await log.close()


def scenario(run: Callable[[Place], Awaitable[None]]) -> Callable[[], None]:
    def test() -> None:
        async def act() -> None:
            place = Place()
            await run(place)
            await place.close()

        asyncio.run(act())

    test.__name__, test.__doc__ = run.__name__, run.__doc__
    return test


async def move(shard: ShardId, source: DiskLog, target: DiskLog) -> None:
    await source.release(shard)
    await target.acquire(shard)


def main_of(log: DiskLog, topic: str = "a") -> ShardId:
    return log.metadata.topics.shard_of(topic, 0)


async def begun(place: Place) -> tuple[DiskLog, DiskLog, ShardId]:
    """Two logs; the first one serves the shard of topic `a`, with a message."""
    first, second = await place.two()
    await first.metadata.ensure_topic("a")
    shard = main_of(first)
    await first.acquire(shard)
    await first.append(one("a", b"1"))
    return first, second, shard


# --- Owners ---


@scenario
async def test_log_serves_only_what_it_has_acquired(place: Place) -> None:
    first, second, shard = await begun(place)
    assert first.shards() == [shard]
    assert second.shards() == []
    for log in (second,):
        with pytest.raises(MovedError):
            log.append(one("a", b"2"))
        with pytest.raises(MovedError):
            await log.read("a", 0, 1)
        with pytest.raises(MovedError):
            await log.metadata.purge_topic("a")
        with pytest.raises(MovedError):
            await log.wait_room(shard)


@scenario
async def test_shard_of_another_log_cannot_be_acquired(place: Place) -> None:
    first, second, shard = await begun(place)
    for _ in range(2):
        with pytest.raises(MovedError):
            await second.acquire(shard)
    await first.release(shard)
    await second.acquire(shard)
    with pytest.raises(MovedError):
        await first.acquire(shard)


@scenario
async def test_each_owner_has_a_higher_epoch_and_positions_stay(place: Place) -> None:
    first, second, shard = await begun(place)
    epochs = [first.shard(shard).epoch]
    position = Position(epochs[0], 1)
    for source, target in [(first, second), (second, first)] * 3:
        await move(shard, source, target)
        appended = await target.append(one("a", b"%d" % len(epochs)))
        epochs.append(target.shard(shard).epoch)
        assert appended.epoch == epochs[-1]
        assert appended.base_offsets == [len(epochs)]
        assert len(read_payloads(await target.read_shard(shard, position))) == len(epochs)
    assert epochs == sorted(set(epochs))


# --- What moves with a shard ---


@scenario
async def test_named_publisher_continues_at_the_next_owner(place: Place) -> None:
    first, second, shard = await begun(place)
    original = await first.append(numbered("p", 0, term=7, payload=b"0"))
    await first.append(numbered("p", 1, term=7, payload=b"1"))
    await move(shard, first, second)
    repeated = await second.append(numbered("p", 0, term=7, payload=b"0"))
    assert repeated.is_repeated
    assert list(repeated.base_offsets) == list(original.base_offsets)
    assert (await second.append(numbered("p", 1, term=7, payload=b"1"))).is_repeated
    with pytest.raises(ProducerFault):
        await second.append(numbered("p", 3, term=7))
    assert not (await second.append(numbered("p", 2, term=7))).is_repeated


@scenario
async def test_progress_of_subscriptions_moves_with_the_shard(place: Place) -> None:
    first, second, shard = await begun(place)
    state = first.shard(shard).state
    state.snapshot = lambda: [b"all"]
    await state.add(b"1")
    await move(shard, first, second)
    state = second.shard(shard).state
    assert state.contents == [b"1"]
    state.snapshot = lambda: [b"all"]
    await state.add(b"2")
    await move(shard, second, first)
    assert first.shard(shard).state.contents == [b"1", b"2"]


@scenario
async def test_last_value_beyond_retention_moves_with_the_shard(place: Place) -> None:
    first, second = await place.two()
    for topic in ("last/old", "last/new"):
        await first.metadata.ensure_topic(topic)
    shard = main_of(first, "last/old")
    assert main_of(first, "last/new") == shard
    await first.acquire(shard)
    await first.append(one("last/old", b"long ago"))
    for number in range(5):
        await first.append(one("last/new", b"%d" % number))
    assert (await first.trim_shard(shard)).segments_removed
    assert await first.bounds("last/old", 0) == OffsetBounds(2, 2)
    await move(shard, first, second)
    chosen = [
        each async for some in second.messages_at(shard, {("last/old", 0): 1}) for each in some
    ]
    assert [message.payload for each in chosen for message in each.batch.messages()] == [
        b"long ago"
    ]


@scenario
async def test_definition_that_another_log_changes_at_the_same_time_is_not_lost(
    place: Place,
) -> None:
    first, second = await place.two()
    await first.metadata.set_subscription("s", b"members")
    outcomes = await asyncio.gather(
        first.metadata.set_subscription("s", b"members and one", replaces=b"members"),
        second.metadata.set_subscription("s", b"members and another", replaces=b"members"),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), Unavailable]
    for log in (first, second):
        assert log.metadata.subscriptions() == {"s": b"members and one"}
    await second.metadata.set_subscription("s", b"all of them", replaces=b"members and one")


@scenario
async def test_metadata_is_the_same_at_every_log(place: Place) -> None:
    first, second, shard = await begun(place)
    await second.metadata.set_cursor("c", [CursorPosition(topic="a", offset=1)])
    await second.metadata.set_subscription("s", b"definition")
    assert [cursor.name for cursor in first.metadata.cursors.all()] == ["c"]
    assert first.metadata.subscriptions() == {"s": b"definition"}
    await first.metadata.remove_cursor("c")
    await first.metadata.remove_subscription("s")
    assert not second.metadata.cursors.all()
    assert second.metadata.subscriptions() == {}
    terms = [await log.metadata.take_term("p") for log in (first, second, first, second)]
    assert terms == sorted(set(terms))
    third = await place.open("third")
    assert third.metadata.topics.get("a").shards == [shard]
    assert await third.metadata.take_term("p") > terms[-1]


# --- Topics ---


@scenario
async def test_topic_made_at_one_log_is_published_to_at_the_owners_of_its_shards(
    place: Place,
) -> None:
    first, second = await place.two()
    shards = (await first.metadata.ensure_topic("wide")).shards
    assert len(set(shards)) == 2
    for log, shard in zip((first, second), dict.fromkeys(shards), strict=True):
        await log.acquire(shard)
    for partition, shard in enumerate(shards):
        owner = first if shard in first.shards() else second
        assert (await owner.append(one("wide", b"x", partition=partition))).base_offsets == [1]


@scenario
async def test_two_logs_make_one_topic_at_the_same_time(place: Place) -> None:
    first, second = await place.two()
    made = await asyncio.gather(first.metadata.ensure_topic("a"), second.metadata.ensure_topic("a"))
    assert made[0].shards == made[1].shards
    assert len([each for each in place.shared.records if getattr(each, "name", "") == "a"]) == 1


@scenario
async def test_of_two_policies_for_a_new_topic_the_first_one_counts(place: Place) -> None:
    """The rules of two logs may differ for a moment."""
    first, _ = await place.two()
    rules = (TopicRule(match="*", journal="elsewhere", partitions=3),)
    late = await place._open("late", rules)
    place.logs.append(late)
    outcomes = await asyncio.gather(
        first.metadata.ensure_topic("a"),
        late.metadata.ensure_topic("a"),
        return_exceptions=True,
    )
    assert isinstance(outcomes[1], Unavailable)
    await asyncio.sleep(0)
    again = await late.metadata.ensure_topic("a")
    assert again.shards == first.metadata.topics.get("a").shards
    assert again.policy.partitions == 1


@scenario
async def test_of_two_policies_for_a_topic_made_again_the_first_one_counts(place: Place) -> None:
    first, _, _ = await begun(place)
    late = await place._open("late", (TopicRule(match="*", journal="elsewhere", partitions=3),))
    place.logs.append(late)
    await first.metadata.delete_topic("a")
    outcomes = await asyncio.gather(
        first.metadata.ensure_topic("a"),
        late.metadata.ensure_topic("a"),
        return_exceptions=True,
    )
    # The owner of the former topic's shard records the generation there first, so the other one is faster.
    assert isinstance(outcomes[0], Unavailable)
    assert not isinstance(outcomes[1], BaseException)
    for _ in range(5):
        await asyncio.sleep(0)  # whatever its failure still does
    again = await first.metadata.ensure_topic("a")
    assert again.shards == outcomes[1].shards
    assert again.policy.partitions == 3


@scenario
async def test_topic_deleted_elsewhere_is_hidden_at_the_owner_of_its_shard(place: Place) -> None:
    first, second, shard = await begun(place)
    with pytest.raises(MovedError):
        await second.metadata.delete_topic("a")  # the owner knows what is stored
    await first.metadata.delete_topic("a")
    with pytest.raises(UnknownTopicError):
        await first.read("a", 0, 1)
    assert second.metadata.topics.find("a") is None
    await second.metadata.ensure_topic("a")
    await first.append(one("a", b"again"))
    assert await first.bounds("a", 0) == OffsetBounds(2, 3)
    await move(shard, first, second)
    assert [message.payload for message in await read_all(second, "a", 2)] == [b"again"]
    assert await second.bounds("a", 0) == OffsetBounds(2, 3)


@scenario
async def test_topic_made_again_while_nobody_serves_its_shard(place: Place) -> None:
    first, second, shard = await begun(place)
    await first.metadata.delete_topic("a")
    await first.release(shard)
    await second.metadata.ensure_topic("a")
    await second.acquire(shard)
    assert await second.bounds("a", 0) == OffsetBounds(2, 2)
    await second.append(one("a", b"again"))
    await move(shard, second, first)
    assert [message.payload for message in await read_all(first, "a", 2)] == [b"again"]


@scenario
async def test_offsets_hidden_with_a_batch_that_was_lost_are_not_used_again(place: Place) -> None:
    """A deletion also hides what is being stored. If that is lost, a message at its offset would be hidden, too."""
    first = await place.open(
        "first", lambda group, _: Fate.LOST_BEFORE if group.first_entry > 2 else Fate.STORED
    )
    second = await place.open("second")
    await first.metadata.ensure_topic("a")
    shard = main_of(first)
    await first.metadata.ensure_topic("d")
    assert main_of(first, "d") == shard
    await first.acquire(shard)
    await first.append(one("a", b"1"))
    await first.append(one("d", b"1"))
    lost = first.append(one("a", b"never", b"stored"))
    await first.metadata.delete_topic("a")
    await first.metadata.purge_topic("d")  # the shard's catalogue is written anew
    await first.drop(shard)
    assert isinstance(lost.exception(), Unavailable)
    await second.metadata.ensure_topic("a")
    await second.acquire(shard)
    [offset] = (await second.append(one("a", b"2"))).base_offsets
    assert [message.payload for message in await read_all(second, "a", offset)] == [b"2"]
    assert await second.bounds("a", 0) == OffsetBounds(offset, offset + 1)


# --- Losses ---


@scenario
async def test_acknowledged_messages_are_there_after_an_owner_was_lost(place: Place) -> None:
    first, second, shard = await begun(place)
    answers = []
    for number in range(2, 9):
        answers.append(first.append(one("a", b"%d" % number)))
        if number < 5:
            await answers[-1]
    acknowledged = [
        b"1",
        *(b"%d" % number for number, answer in enumerate(answers, 2) if answer.done()),
    ]
    await first.drop(shard)
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert any(isinstance(outcome, Unavailable) for outcome in outcomes)
    await second.acquire(shard)
    found = [message.payload for message in await read_all(second, "a")]
    assert found[: len(acknowledged)] == acknowledged
    assert found == [b"%d" % number for number in range(1, len(found) + 1)]


@scenario
async def test_copy_of_a_directory_with_several_owners_is_refused(place: Place) -> None:
    first, _, _ = await begun(place)
    with pytest.raises(ClientFault, match="several brokers serve"):
        await first.checkpoint()


@scenario
async def test_loss_of_what_another_owner_stored_is_noticed(place: Place) -> None:
    """Cut at the end of an earlier block, the segment looks whole: only the other log's mark knows better."""
    first, second, shard = await begun(place)
    await move(shard, first, second)
    [segment] = second._owned.shards[shard].growing_ends().items()
    await second.append(one("a", b"2"))
    await second.drop(shard)
    place.disk.open(segment[0], FileAccess.WRITE).truncate(segment[1])
    await first.acquire(shard)
    assert any("lost" in told for told in first.statistics().damage)


# --- Streams that change their owners all the time ---


SMALL_SEGMENTS = (TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=700)),)


@pytest.mark.parametrize("first_seed", range(0, 40, 10))
def test_stream_that_changes_its_owner_at_any_time_has_every_message_once(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 10):
        asyncio.run(_changing_owners(seed))


async def _changing_owners(seed: int) -> None:
    place = Place(seed, SMALL_SEGMENTS)
    random = place.random
    logs = [await place.open(name) for name in ("first", "second", "third")]
    await logs[0].metadata.ensure_topic("a")
    shard = main_of(logs[0])
    owner = logs[0]
    await owner.acquire(shard)
    sent = 0
    for _ in range(12):
        waiting: list[tuple[int, asyncio.Future[object]]] = []
        for _ in range(random.randint(0, 6)):
            payload = b"%d" % sent
            stored = owner.append(numbered("p", sent, term=1, payload=payload))
            waiting.append((sent, asyncio.ensure_future(stored)))
            sent += 1
            for _ in range(random.choice((0, 0, 1, 5))):
                await asyncio.sleep(0)
        is_planned = random.random() < 0.5
        await (owner.release(shard) if is_planned else owner.drop(shard))
        owner = random.choice([log for log in logs if log is not owner])
        await owner.acquire(shard)
        outcomes = await asyncio.gather(*(answer for _, answer in waiting), return_exceptions=True)
        for (number, _), outcome in zip(waiting, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                assert not is_planned, outcome
                assert isinstance(outcome, Unavailable)
                again = await owner.append(numbered("p", number, term=1, payload=b"%d" % number))
                assert list(again.base_offsets) == [number + 1]
    assert [message.payload for message in await read_all(owner, "a")] == [
        b"%d" % number for number in range(sent)
    ]
    page = await owner.read_shard(shard, Position(0, 1), bytes_max=2**20)
    assert read_payloads(page)[:1] == ([b"0"] if sent else [])
    await place.close()


def test_restart_of_one_log_alone_has_what_several_logs_have_stored() -> None:
    async def act() -> None:
        place = Place()
        first, second, shard = await begun(place)
        await first.append(batch(("a", [b"2"])))
        await move(shard, first, second)
        await second.append(one("a", b"3"))
        await place.close()
        alone = await place._open(None)
        assert [message.payload for message in await read_all(alone, "a")] == [b"1", b"2", b"3"]
        assert alone.recovered.was_clean
        await alone.close()

    asyncio.run(act())
