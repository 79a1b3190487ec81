"""How far a cursor is behind: in messages that match, never too few, and cheap however many topics there are."""

from __future__ import annotations

import pytest

from runnel.broker.broker import Broker
from runnel.config import Rotate, TopicRule
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import CursorPlace
from runnel.log.match_count import KEYS_PER_STEP
from runnel.log.memory.stored_batch import SortedQueue
from runnel.log.segments.index import GrowingIndex
from tests.broker.loop_probe import LoopProbe
from tests.broker.scenes import At, Store, publish_batch, scene

ONE_JOURNAL = TopicRule(match="*", journal="main")
SMALL_SEGMENTS = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=1))


async def lag(broker: Broker, name: str = "archive") -> int:
    (cursor,) = await broker.cursors.list(name)
    return sum(place.lag for place in cursor.places)


async def set_at(broker: Broker, entry: int, *patterns: str, row: int = 0) -> None:
    place = CursorPlace(journal="main", entry=entry, row=row, patterns=patterns)
    await broker.cursors.set("archive", [place])


@scene(ONE_JOURNAL)
async def test_messages_of_other_topics_in_the_journal_are_no_lag(at: At) -> None:
    await at.publish("sensors/a", b"1")
    await set_at(at.broker, 2, "sensors/*")
    for _ in range(5):
        await at.publish("orders/x", b"1", b"2", b"3")
    assert await lag(at.broker) == 0
    await at.publish("sensors/a", b"2", b"3")
    await at.publish("sensors/new", b"1")
    assert await lag(at.broker) == 3


@scene(SMALL_SEGMENTS, patterns=("sensors/*", "*", "sensors/a"))
async def test_lag_counts_matching_messages_over_all_segments(at: At) -> None:
    """Every batch rotates: all but the last lie in sealed segments."""
    sent: list[list[str]] = []
    for number in range(8):
        topics = [["sensors/a"] * 2, ["orders/x"], ["sensors/b", "orders/y", "sensors/a"]][
            number % 3
        ]
        sent.append(topics)
        await publish_batch(
            at.broker, Batch.from_messages([Message(each, b"x") for each in topics])
        )
    folder = at.pattern.rstrip("*")
    for entry in (1, 4, 9, 3, 8, 1):  # back, too; and once more what is remembered
        await set_at(at.broker, entry, at.pattern)
        behind = [topic for topics in sent[entry - 1 :] for topic in topics]
        assert await lag(at.broker) == sum(topic.startswith(folder) for topic in behind)


@scene(ONE_JOURNAL)
async def test_what_is_purged_or_deleted_is_no_lag(at: At) -> None:
    for topic in ("s/a", "s/b", "s/c"):
        await at.publish(topic, b"1", b"2")
    await set_at(at.broker, 1, "s/*")
    assert await lag(at.broker) == 6
    await at.broker.purge_topic("s/a")
    assert await lag(at.broker) == 4
    await at.broker.delete_topic("s/b")
    assert await lag(at.broker) == 2


@scene(ONE_JOURNAL)
async def test_lag_is_never_too_low_where_a_batch_was_read_in_part(at: At) -> None:
    await at.publish("s/a", b"1", b"2", b"3")
    await set_at(at.broker, 1, "s/*", row=2)
    assert 1 <= await lag(at.broker) <= 3


@scene(ONE_JOURNAL)
async def test_metric_of_an_idle_archive_stays_at_zero(at: At) -> None:
    await at.publish("sensors/a", b"1")
    await set_at(at.broker, 2, "sensors/*")
    await at.publish("orders/x", b"1")
    await at.broker.monitor.refresh()
    families = {family.described.name: family for family in at.broker.metrics.families()}
    assert families["cursor_lag_messages"].rows == [(("archive",), 0)]


@pytest.mark.parametrize("store", list(Store), ids=lambda store: store.value)
def test_counting_goes_in_steps(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    @scene(ONE_JOURNAL)
    async def run(at: At) -> None:
        messages = [Message(f"t/{number:05}", b"x") for number in range(5 * KEYS_PER_STEP)]
        await publish_batch(at.broker, Batch.from_messages(messages))
        await set_at(at.broker, 1, "*")
        probe = LoopProbe(monkeypatch)
        probe.count(GrowingIndex, "first_run_from_block")
        probe.count(SortedQueue, "number_from")
        async with probe:
            assert await lag(at.broker) == len(messages)
        assert probe.total >= len(messages)
        assert probe.most <= KEYS_PER_STEP + 10
        async with probe:
            assert await lag(at.broker) == len(messages)
        assert probe.total < 2 * len(messages)  # nothing has changed: it is remembered

    run(store, "")
