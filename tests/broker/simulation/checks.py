"""Holding what the broker serves against the model: every reader, every partition, every cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnel.broker.fetcher import FetchRequest
from runnel.broker.topics import TopicListRequest
from runnel.config import Keep
from runnel.errors import OffsetAheadError, OffsetGoneError, SlowReaderError
from runnel.formats.message import Message
from runnel.log.log import ShardId
from runnel.topics.names import TopicPartition
from tests.broker.simulation.plan import TOPICS
from tests.broker.simulation.reader import SimulatedReader
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.broker.simulation.history import History


def is_behind(reader: SimulatedReader) -> bool:
    subscription = reader.subscription
    return subscription is not None and (
        subscription.is_behind or subscription.is_fed or subscription.queued_bytes > 0
    )


def live_epoch(history: History, topic: str) -> int | None:
    """The epoch of a topic that is not kept; None if it does not exist because it has no reader."""
    found = history.broker._ephemeral.find(topic)
    return None if found is None else found.epoch


# --- Where readers begin ---


def begins_now(
    history: History, reader: SimulatedReader, *, is_begun: bool
) -> dict[TopicPartition, tuple[int, int]]:
    """For each partition the lowest offset that a reader may begin with now, and the first that it must get.

    A reader begins at one moment between the call and its return: what is under way then may count or not.
    """
    start = reader.start
    given = {(place.topic, place.partition): place.offset for place in start.partitions}
    begins: dict[TopicPartition, tuple[int, int]] = {}
    for key in history.model.keys(TOPICS):
        if history.model.policy(key[0]).keep is Keep.NONE or not reader.matches(key[0]):
            continue
        partition = history.model.partition(key)
        end = partition.next_offset if is_begun else partition.stored_next
        match start.kind:
            case "earliest":
                begin = partition.floor
            case "last":
                begin = max(1, end - 1)
            case "offsets" if key in given:
                begin = given[key]
            case "time":
                later = [
                    number
                    for number, sent in enumerate(partition.sent, 1)
                    if sent.time_ns >= start.time_ns
                ]
                begin = min([*later, end])
            case _:
                begin = end
        if key[0] not in history.model.existing:
            begin = partition.floor  # whatever it will be, it is made later
        begins[key] = (begin, begin)
    return begins


def note_gone_on(history: History, reader: SimulatedReader) -> None:
    """A reader that lost its connection among last values gets those where nothing has come since it began."""
    for key, end in reader.ends.items():
        low, high = reader.begins[key]
        if history.model.partition(key).next_offset > end:
            reader.begins[key] = (low, min(high + 1, max(high, end)))


def note_lost(history: History, reader: SimulatedReader) -> None:
    """The broker restarts: what it had in memory is lost, and of what is kept there readers are told."""
    gone = [key for key in reader.seen if history.is_in_memory(key[0])]
    reader.lost = {
        key
        for key in gone
        if reader.seen[key].offsets and history.model.policy(key[0]).keep is Keep.MEMORY
    }
    reader.shard_gaps = 0
    for key in gone:
        del reader.seen[key]


def note_lost_shard(history: History, reader: SimulatedReader, shard: ShardId) -> None:
    """A shard in memory has gone. Its messages are lost, and readers of some are told when they resume."""
    lost = {
        key for key, seen in reader.seen.items() if seen.offsets and history.shard_of(key) == shard
    }
    if lost:
        reader.lost |= lost
        reader.shard_gaps = 0
        for key in lost:
            del reader.seen[key]


# --- What readers get ---


def check_message(history: History, reader: SimulatedReader, message: Message) -> None:
    """At the moment when it is delivered."""
    key = (message.topic, message.partition)
    if history.model.policy(message.topic).keep is Keep.NONE:
        return
    partition = history.model.partition(key)
    sent = partition.at(message.offset)
    if sent is None or sent.payload != message.payload:
        reader.problems.append(f"{key} {message.offset} is {message.payload!r}, not {sent}")
        return
    lowest = reader.begins.get(key, (1, 1))[0]
    if message.offset < lowest:
        reader.problems.append(f"{key} {message.offset} lies before its start at {lowest}")


def _check_reader(history: History, reader: SimulatedReader) -> None:
    if reader.error is not None and not isinstance(reader.error, SlowReaderError):
        raise Violation(f"{reader} was ended: {reader.error}")
    for key in history.model.keys(TOPICS):
        if not reader.matches(key[0]):
            if key in reader.seen:
                raise Violation(f"{reader} got {key}")
        elif history.model.policy(key[0]).keep is Keep.NONE:
            _check_live(reader, key)
        elif reader.error is None:
            _check_kept(history, reader, key)


def _check_kept(history: History, reader: SimulatedReader, key: TopicPartition) -> None:
    model = history.model
    partition = model.partition(key)
    seen = {offset for _, offset in reader.of(key).offsets}
    first = reader.begins.get(key, (1, 1))[1]
    last_seen = max(seen, default=0)
    gaps = [gap for gap in reader.of(key).gaps if gap.reason != "restart"]
    told = {n for gap in gaps for n in range(gap.first_offset, gap.next_offset)}
    for gap in gaps:
        if gap.missed != gap.next_offset - gap.first_offset:
            raise Violation(f"{reader}: {gap} does not count right")
    if told & seen:
        raise Violation(f"{reader}: {key} reported as gaps, but sent too: {sorted(told & seen)}")
    for offset in range(first, partition.next_offset):
        if offset in seen:
            continue
        if model.must_have(key, offset):
            raise Violation(
                f"{reader}: {key} {offset} never came; it begins at {first}, has "
                f"{sorted(seen)}, gaps {gaps}"
            )
        if (
            reader.is_literal  # a reader by shards gets gaps of shards
            and model.policy(key[0]).retain.age_ns is not None
            and min(seen, default=offset) < offset < last_seen
            and offset >= partition.floor
            and offset not in told
        ):
            raise Violation(f"{reader}: nobody told that {key} {offset} is gone: {gaps}")
    if key in reader.lost and not (
        any(gap.reason == "restart" for gap in reader.of(key).gaps) or reader.shard_gaps
    ):
        raise Violation(f"{reader}: nobody told that {key} was lost with the broker's memory")
    missed = [gap for gap in gaps if gap.reason == "overflow"]
    if missed:
        raise Violation(f"{reader}: {key} is kept, and yet: {missed}")


def _check_live(reader: SimulatedReader, key: TopicPartition) -> None:
    seen = reader.of(key)
    expected = reader.live.get(key, {})
    strange = [place for place in seen.offsets if place not in expected]
    if reader.start.kind == "last":
        strange = strange[reader.last_asked :]  # last values from before it began
    if strange:
        raise Violation(f"{reader}: {key} {strange} were not for it: {expected}")
    if reader.error is not None:
        return
    unseen = [place for place in expected if place not in set(seen.offsets)]
    sure = sum(expected[place] for place in unseen)
    missed = sum(gap.missed for gap in seen.gaps if gap.reason == "overflow")
    if not sure <= missed <= len(unseen):
        raise Violation(
            f"{reader}: {key}: {missed} are said to be missed, of {expected} it has "
            f"{seen.offsets}: {seen.gaps}"
        )


# --- What there is ---


async def check_everything(history: History) -> None:
    for reader in history.readers:
        _check_reader(history, reader)
    listed, _ = await history.patiently(
        history.broker.topics.list(TopicListRequest("[dabmox]/*")), "listing"
    )
    if [topic.name for topic in listed] != sorted(history.model.existing):
        raise Violation(f"there are {sorted(history.model.existing)}, but listed {listed}")
    for key in history.model.keys(history.model.existing):
        while True:
            try:
                await _check_partition(history, key)
            except OffsetGoneError as gone:
                if not _may_have_gone(history, key, range(gone.offset, gone.first_offset)):
                    raise
            else:
                break
    await _check_cursors(history)


async def _check_partition(history: History, key: TopicPartition) -> None:
    model, now_ns = history.model, history.now_ns
    partition = model.partition(key)
    state = await history.patiently(history.broker.topics.describe(key[0]), "describing")
    first, end = state.partitions[key[1]].first_offset, state.partitions[key[1]].next_offset
    if end != partition.next_offset:
        raise Violation(f"{key} goes up to {partition.next_offset}, but described as {state}")
    offset = first
    found: list[int] = []
    messages_max = history.random.choice((0, 0, 0, 5))
    while offset < end:
        fetched = await history.patiently(
            history.broker.fetch(FetchRequest(*key, offset=offset, messages_max=messages_max)),
            "fetching",
        )
        if fetched.next_offset <= offset or fetched.end_offset != end:
            raise Violation(f"fetching {key} from {offset} leads to {fetched}")
        for batch in fetched.batches:
            for message in batch.messages():
                sent = partition.at(message.offset)
                if sent is None or sent.payload != message.payload:
                    raise Violation(f"fetching {key} gave {message}, not {sent}")
                if not offset <= message.offset < fetched.next_offset:
                    raise Violation(f"fetching {key} from {offset} gave {message.offset}")
                if not model.may_have(key, message.offset, now_ns):
                    raise Violation(f"fetching {key} gave {message.offset}, which is gone")
                found.append(message.offset)
        offset = fetched.next_offset
    if found != sorted(set(found)):
        raise Violation(f"fetching {key} gave {found}")
    for number in range(1, end):
        if model.must_have(key, number) and number not in found:
            raise Violation(f"fetching {key} from {first} gave {found}, not {number}")
    await _check_refusals(history, key, first, end)


def _may_have_gone(history: History, key: TopicPartition, offsets: range) -> bool:
    """Retention may have been at work since the last look: by size, or past an age, whatever cursor was set later."""
    return not any(history.model.must_have(key, offset) for offset in offsets)


async def _check_refusals(history: History, key: TopicPartition, first: int, end: int) -> None:
    try:
        await history.patiently(
            history.broker.fetch(FetchRequest(*key, offset=end + 1)), "fetching"
        )
    except OffsetAheadError as ahead:
        if ahead.next_offset != end:
            raise Violation(f"{key} ends at {end}, but: {ahead}") from ahead
    else:
        raise Violation(f"{key} ends at {end}, but was fetched from behind")
    if first > 1:
        try:
            await history.patiently(
                history.broker.fetch(FetchRequest(*key, offset=first - 1)), "fetching"
            )
        except OffsetGoneError as gone:
            since = range(first, gone.first_offset)
            if gone.first_offset < first or not _may_have_gone(history, key, since):
                raise Violation(f"{key} begins at {first}, but: {gone}") from gone
        else:
            raise Violation(f"{key} begins at {first}, but was fetched from before")


async def _check_cursors(history: History) -> None:
    listed = {
        cursor.name: {(place.topic, place.partition): place for place in cursor.places}
        for cursor in await history.broker.cursors.list()
    }
    if listed.keys() != history.model.cursors.keys():
        raise Violation(f"cursors {sorted(history.model.cursors)}, but listed {sorted(listed)}")
    for name, places in history.model.cursors.items():
        for key, offset in places.items():
            place = listed[name][key]
            lag = history.model.partition(key).next_offset - offset
            if (place.offset, place.lag) != (offset, lag):
                raise Violation(f"cursor {name} stands at {key} {offset}, lag {lag}, not {place}")
