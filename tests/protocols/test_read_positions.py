"""A live reader has the same position, whichever protocol encodes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from runnel.broker.live.subscription import LiveDelivery, LiveSubscription
from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import Deliver, GapState, PartitionPlace, ShardPlace, Start, Subscribed
from runnel.log.log import ShardId
from runnel.protocols.grpc.encoding.positions import StreamPosition, read_position, start_at
from runnel.protocols.http.encoding.event_ids import EventIds, resumed
from runnel.protocols.http.encoding.sent_last_values import SentLists

TOPICS: Final = ("a", "b", "c")
NAMED: Final = (*TOPICS, "later")
WILDCARDS: Final = ("?", "later*")


class Stored(NamedTuple):
    """A stored batch is delivered: a run of each of these topics, in one entry of a shard."""

    shard: int
    is_new_epoch: bool  # the log was in memory, and the broker restarted: offsets begin again at 1
    runs: Sequence[tuple[str, int]]  # topic, count


class Removed(NamedTuple):
    """A gap: so many messages of a topic will not come."""

    topic: str
    messages: int


class Passed(NamedTuple):
    """Entries of a shard without messages for the reader: only the next entry is delivered."""

    shard: int
    entries: int


_COUNTS = st.integers(1, 4)
_SHARDS = st.integers(0, 2)
_EVENTS: Final = st.lists(
    st.builds(
        Stored,
        _SHARDS,
        st.booleans(),
        st.lists(st.tuples(st.sampled_from(NAMED), _COUNTS), min_size=1, max_size=3),
    )
    | st.builds(Removed, st.sampled_from(NAMED), _COUNTS)
    | st.builds(Passed, _SHARDS, _COUNTS),
    max_size=12,
)


class Readers:
    """The same reader as a client, over HTTP and over gRPC, and the log that it reads."""

    def __init__(self, patterns: Sequence[str], start: Start) -> None:
        self.patterns = patterns
        self.lists = SentLists()
        self.client = SubscriptionPosition(patterns, start)
        self.http = EventIds(patterns, start, self.lists)
        self.grpc = StreamPosition(patterns, start, None)
        self.is_by_partition = "?" not in patterns
        self.epoch = 1
        self.offsets = dict.fromkeys(NAMED, 1)
        self.entries = dict.fromkeys(range(3), 1)

    def begin(self) -> None:
        partitions = [PartitionPlace(topic, 0, 1, 1) for topic in TOPICS]
        shards = [ShardPlace("main", shard, 1, 1) for shard in range(3)]
        if self.is_by_partition:
            shards = []
        else:
            partitions = []
        answer = Subscribed(1, 1, partitions, shards)
        self.client.begin(answer)
        self.http.begin(shards, partitions)
        subscription = LiveSubscription.__new__(LiveSubscription)
        subscription.partitions, subscription.shards = partitions, shards
        self.grpc.begin(subscription)

    def take(self, event: Stored | Removed | Passed) -> None:
        match event:
            case Stored():
                self._take_batch(event)
            case Removed(topic, count):
                first = self.offsets[topic]
                self.offsets[topic] += count
                gap = GapState("retention", count, topic, 0, first, first + count, "")
                self.client.missed(gap)
                self.http.missed(gap)
                self.grpc.missed(gap)
            case Passed(shard, count) if not self.is_by_partition:
                self.entries[shard] += count
                delivery = LiveDelivery(
                    ShardId("main", shard), self.epoch, self.entries[shard], (), 0, 0
                )
                self.client.delivered(
                    Deliver(1, "main", shard, self.epoch, delivery.next_entry), ()
                )
                self.http.passed("main", shard, self.epoch, delivery.next_entry)
                self.grpc.delivered(delivery)

    def _take_batch(self, stored: Stored) -> None:
        if stored.is_new_epoch:
            self.epoch += 1
            self.offsets = dict.fromkeys(NAMED, 1)
        entry = self.entries[stored.shard]
        next_entry = self.entries[stored.shard] = entry + 1
        batch = self._batch(stored, entry)
        shard, epoch = stored.shard, self.epoch
        self.client.delivered(Deliver(1, "main", shard, epoch, next_entry), [batch])
        ids = list(self.http.ids(batch, "main", shard, epoch, next_entry, is_whole=True))
        assert self.resumed_after(ids[-1]) == self.http_start()
        # As the gRPC listener does with a large batch: half of the rows first, and then the delivery as a whole.
        self.grpc.delivered_rows(batch, len(batch) // 2)
        size = len(batch.body)
        self.grpc.delivered(
            LiveDelivery(ShardId("main", shard), epoch, next_entry, (), size, len(batch)), [batch]
        )

    def _batch(self, stored: Stored, entry: int) -> Batch:
        messages = [Message(topic, b"x") for topic, count in stored.runs for _ in range(count)]
        batch = Batch.from_messages(messages)
        offsets = []
        for run in batch.runs():
            offsets.append(self.offsets[run.topic])
            self.offsets[run.topic] += run.count
        return Batch(
            msgspec.structs.replace(
                batch.envelope,
                base_offsets=b"".join(offset.to_bytes(8, "little") for offset in offsets),
                receive_times=(1).to_bytes(8, "little") * len(offsets),
                epochs=self.epoch.to_bytes(8, "little") * len(offsets),
                entries=entry.to_bytes(8, "little") * len(offsets),
            ),
            batch.body,
        )

    def end_last_values(self) -> None:
        self.client.delivered(Deliver(1, "live", 0, 0, 0), ())
        self.http.last_sent()
        self.grpc.last_values_sent()

    # --- Where each would resume ---

    def resumed_after(self, text: str | None) -> object:
        assert text is not None
        return comparable(resumed(text, self.patterns, self.lists)[0])

    def client_start(self) -> object:
        return comparable(self.client.next_start())

    def http_start(self) -> object:
        return self.resumed_after(self.http.current())

    def grpc_start(self) -> object:
        return comparable(start_at(read_position(self.grpc.pack(), self.patterns)))


def comparable(start: Start) -> object:
    """A start without the order of its positions, which each protocol chooses."""
    return start.kind, set(start.partitions), set(start.shards)


@given(_EVENTS, st.booleans(), st.booleans(), st.integers(0, 12))
def test_every_protocol_resumes_at_the_same_position(
    events: list[Stored | Removed | Passed],
    is_by_partition: bool,
    is_with_last_values: bool,
    caught_up_after: int,
) -> None:
    start = Start("last" if is_with_last_values else "latest")
    readers = Readers(NAMED if is_by_partition else WILDCARDS, start)
    readers.begin()
    assert readers.client_start() == readers.http_start() == readers.grpc_start()
    for number, event in enumerate(events):
        readers.take(event)
        if is_with_last_values and number == caught_up_after:
            readers.end_last_values()
        assert readers.client_start() == readers.http_start() == readers.grpc_start()


def test_the_position_is_behind_what_was_delivered_and_what_is_missing() -> None:
    readers = Readers(NAMED, Start("latest"))
    readers.begin()
    readers.take(Stored(0, False, [("a", 3), ("later", 2)]))
    readers.take(Removed("b", 5))
    readers.take(Removed("later", 4))
    assert readers.client_start() == (
        "resume",
        {
            PartitionPlace("a", 0, 4, 1),
            PartitionPlace("b", 0, 6, 1),
            PartitionPlace("c", 0, 1, 1),
            PartitionPlace("later", 0, 7, 1),
        },
        set(),
    )


def test_with_wildcards_the_position_is_the_next_entry_of_each_shard() -> None:
    readers = Readers(WILDCARDS, Start("last"))
    readers.begin()
    readers.take(Stored(1, True, [("a", 3)]))
    readers.take(Passed(2, 4))
    shards = {ShardPlace("main", 0, 1, 1), ShardPlace("main", 1, 2, 2), ShardPlace("main", 2, 2, 5)}
    assert readers.client_start() == ("resume_last", set(), shards)
    readers.end_last_values()
    assert readers.grpc_start() == ("resume", set(), shards)
