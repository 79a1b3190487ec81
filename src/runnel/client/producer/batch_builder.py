"""The batch builder: pending rows, and the batch that is made of them. Pure: no loop, no connection.

Rows keep the order in which they came. Each field has a list. Options that most messages lack (keys, tags, …) have a
dict by row number. A batch puts the rows of a topic-partition beside each other, in their order, as one run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from runnel.client.results import Receipt
from runnel.errors import ClientFault
from runnel.formats import block, columns, envelope, plain_bodies
from runnel.formats.batch import Batch
from runnel.formats.checksum import crc32c
from runnel.formats.envelope import Codec, Envelope
from runnel.formats.message import NO_TAGS
from runnel.formats.table import FEW_ROWS
from runnel.formats.wire import Published

Buffer: TypeAlias = bytes | memoryview

# Counted for each message besides its payload, so that the number of empty messages is limited too.
MESSAGE_OVERHEAD_BYTES: Final = 64
# Few messages may still be large: then the limits of a batch have to be checked.
_FEW_ROWS_BYTES_MAX: Final = 2**20
_CODECS: Final = {None: Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}


class Settable(Protocol):
    """A future, of asyncio or of concurrent.futures."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


class PendingRows(msgspec.Struct, eq=False):
    """Messages that are not acknowledged. `topics` may be shorter than the rest: missing ones are the default topic."""

    topic: str | None = None
    topics: list[str] = []  # msgspec copies defaults: each struct has its own
    payloads: list[bytes] = []
    event_times_ns: list[int] = []
    keys: dict[int, bytes] = {}
    partition_keys: dict[int, bytes] = {}
    uids: dict[int, bytes] = {}
    tags: dict[int, Mapping[str, str]] = {}
    futures: dict[int, Settable] = {}
    partitions: list[int] | None = None  # None: all 0
    size: int = 0
    generation: int = 0

    def __len__(self) -> int:
        return len(self.payloads)

    def __repr__(self) -> str:
        return f"<PendingRows {len(self)} messages, {self.size} bytes>"  # never their content

    def name_all(self) -> None:
        """Give every row its topic, also the rows of the default topic."""
        if len(self.topics) < len(self.payloads):
            assert self.topic is not None
            self.topics += [self.topic] * (len(self.payloads) - len(self.topics))

    def distinct_topics(self) -> Sequence[str]:
        """Each topic once."""
        if not self.topics and self.topic is not None:
            return (self.topic,)
        self.name_all()
        return list(dict.fromkeys(self.topics))

    def extend(self, others: PendingRows) -> None:
        """Append other rows of the same generation."""
        begin = len(self)
        if self.topics or others.topics or self.topic != others.topic:
            self.name_all()
            others.name_all()
            self.topics += others.topics
        if self.partitions is not None or others.partitions is not None:
            self.partitions = [
                *(self.partitions or [0] * begin),
                *(others.partitions or [0] * len(others)),
            ]
        self.payloads += others.payloads
        self.event_times_ns += others.event_times_ns
        for mine, theirs in zip(self._aside(), others._aside(), strict=True):
            if theirs:
                mine.update((begin + row, value) for row, value in theirs.items())
        self.size += others.size

    def select(self, rows: Sequence[int]) -> PendingRows:
        """A copy of these rows, in this order."""
        selected = PendingRows(self.topic)
        selected.generation = self.generation
        if self.topics:
            self.name_all()
            selected.topics = [self.topics[row] for row in rows]
        if self.partitions is not None:
            selected.partitions = [self.partitions[row] for row in rows]
        selected.payloads = [self.payloads[row] for row in rows]
        selected.event_times_ns = [self.event_times_ns[row] for row in rows]
        if any(self._aside()):
            places = {row: place for place, row in enumerate(rows)}
            for mine, theirs in zip(self._aside(), selected._aside(), strict=True):
                theirs.update((places[row], value) for row, value in mine.items() if row in places)
        selected.size = selected.weighed()
        return selected

    def cut(self, count: int) -> PendingRows:
        """Remove the first rows, and return them."""
        first = PendingRows(self.topic)
        first.generation = self.generation
        first.topics, self.topics = self.topics[:count], self.topics[count:]
        if self.partitions is not None:
            first.partitions, self.partitions = self.partitions[:count], self.partitions[count:]
        first.payloads, self.payloads = self.payloads[:count], self.payloads[count:]
        times = self.event_times_ns
        first.event_times_ns, self.event_times_ns = times[:count], times[count:]
        for mine, theirs in zip(self._aside(), first._aside(), strict=True):
            if mine:
                theirs.update((row, value) for row, value in mine.items() if row < count)
                kept = {row - count: value for row, value in mine.items() if row >= count}
                mine.clear()
                mine.update(kept)
        first.size = first.weighed()
        self.size -= first.size
        return first

    def count_within(self, messages_max: int, bytes_max: int) -> int:
        """How many of the first rows fit a batch with these limits; at least 1."""
        count = len(self.payloads)
        if count <= messages_max and self.size <= bytes_max:
            return count
        payloads = self.payloads[:messages_max]
        if sum(map(len, payloads)) + MESSAGE_OVERHEAD_BYTES * len(payloads) <= bytes_max:
            return len(payloads)
        sizes = accumulate(len(payload) + MESSAGE_OVERHEAD_BYTES for payload in payloads)
        return max(1, sum(size <= bytes_max for size in sizes))

    def weighed(self) -> int:
        """The size, computed from the rows."""
        size = sum(map(len, self.payloads)) + MESSAGE_OVERHEAD_BYTES * len(self.payloads)
        return size + sum(
            sum(map(weight, values.values())) for weight, values in self._weights() if values
        )

    def _weights(self) -> tuple[tuple[Callable[[Any], int], dict[int, Any]], ...]:
        return (
            (len, self.keys),
            (len, self.partition_keys),
            (len, self.uids),
            (tags_size, self.tags),
        )

    def _aside(self) -> tuple[dict[int, Any], ...]:
        return (self.keys, self.partition_keys, self.uids, self.tags, self.futures)

    # --- Settling ---

    def fail(self, error: BaseException) -> bool:
        """Fail the futures of receipts. True: there are messages without a future, whose sender does not know yet."""
        for future in self.futures.values():
            if not future.done():
                future.set_exception(error)
        return len(self.futures) < len(self)


class BuiltBatch(msgspec.Struct, eq=False):
    """A batch as the block that is sent, and the rows that it was made of."""

    rows: PendingRows
    block: tuple[Buffer, Buffer, Buffer]  # its bytes, in three parts
    block_bytes: int
    head: Envelope | None = None  # of a named publisher's batch, which may get another number

    def __repr__(self) -> str:
        return f"<BuiltBatch {self.rows!r}, {self.block_bytes} bytes>"

    def renumber(self, number: int) -> None:
        """Give a named publisher's batch another number."""
        assert self.head is not None
        self.head = msgspec.structs.replace(self.head, number=number)
        _, body, _ = self.block
        self.block = block.pack(envelope.encode(self.head), body)
        self.block_bytes = sum(map(len, self.block))

    def succeed(self, answer: Published) -> None:
        """Resolve the futures of receipts."""
        futures = self.rows.futures
        if not futures:
            return
        topics, partitions, counts, order = _runs(self.rows)
        if len(partitions) == 1:
            partitions = [partitions[0]] * len(topics)
        if len(counts) == 1:
            counts = [counts[0]] * len(topics)
        place_of = None if order is None else {row: at for at, row in enumerate(order)}
        run_of = list(chain.from_iterable([run] * count for run, count in enumerate(counts)))
        begins = [0, *accumulate(counts)]
        for row, future in futures.items():
            place = row if place_of is None else place_of[row]
            run = run_of[place]
            if future.done():
                continue
            base = answer.base_offsets[run] if run < len(answer.base_offsets) else 0
            future.set_result(
                Receipt(
                    topic=topics[run],
                    partition=partitions[run],
                    offset=base + place - begins[run] if base else 0,
                    epoch=answer.epoch,
                    receive_time_ns=answer.receive_time_ns,
                    level=answer.level,
                    receivers=answer.receivers,
                )
            )


def build_batch(
    rows: PendingRows,
    *,
    transmit_time_ns: int,
    shard: int = 0,
    producer: str | None = None,
    term: int = 0,
    number: int = 0,
    codec: Codec = Codec.NONE,
) -> BuiltBatch:
    """Build a batch of these rows, which all go to one shard."""
    topics, partitions, counts, order = _runs(rows)
    if len(topics) == 1 and producer is None and not codec and _are_few_and_plain(rows):
        payloads = rows.payloads
        body = plain_bodies.encode(payloads, rows.event_times_ns, transmit_time_ns)
        encoded = envelope.encode_plain(
            topics[0], partitions[0], len(payloads), shard, len(body), crc32c(body)
        )
        packed = block.pack(encoded, body)
        return BuiltBatch(rows, packed, len(packed[0]) + len(body) + len(packed[2]))
    table = columns.build(
        _ordered(rows.payloads, order),
        event_times_ns=_ordered(rows.event_times_ns, order),
        transmit_time_ns=transmit_time_ns,
        keys=_column(rows.keys, rows, order),
        partition_keys=_column({**rows.keys, **rows.partition_keys}, rows, order)
        if rows.partition_keys
        else None,
        uids=_column(rows.uids, rows, order),
        tags=_tags_column(rows, order),
    )
    batch = Batch.from_columns(
        table,
        topics,
        counts,
        partitions=partitions,
        shard=shard,
        producer=producer,
        term=term,
        number=number,
        codec=codec,
    )
    head = batch.envelope
    packed = block.pack(envelope.encode(head), batch.body)
    size = sum(map(len, packed))
    return BuiltBatch(rows, packed, size, head if producer is not None else None)


def _are_few_and_plain(rows: PendingRows) -> bool:
    """Whether there is little to encode. `send` has checked all of it; larger rows are checked with the batch."""
    if len(rows.payloads) > FEW_ROWS or rows.size > _FEW_ROWS_BYTES_MAX:
        return False
    return not (rows.keys or rows.partition_keys or rows.uids or rows.tags)


def _runs(
    rows: PendingRows,
) -> tuple[Sequence[str], Sequence[int], Sequence[int], Sequence[int] | None]:
    """Topics, partitions and counts of the runs, and the order of the rows in them."""
    partitions = rows.partitions
    count = len(rows.payloads)
    if partitions is not None and partitions.count(partitions[0]) == count:
        partitions = [partitions[0]]
    if partitions is None or len(partitions) == 1:
        partition = (0,) if partitions is None else partitions
        if not rows.topics and rows.topic is not None:
            return (rows.topic,), partition, (count,), None
        rows.name_all()
        distinct = len(set(rows.topics))
        if distinct == 1:
            return rows.topics[:1], partition, (count,), None
        if distinct == count:
            return rows.topics, partition, (1,), None
        by_topic: dict[str, list[int]] = {topic: [] for topic in rows.topics}
        for row, topic in enumerate(rows.topics):
            by_topic[topic].append(row)
        groups = list(by_topic.values())
        return (list(by_topic), partition, list(map(len, groups)), _flat(groups))
    rows.name_all()
    by_partition: dict[tuple[str, int], list[int]] = {}
    for row, place in enumerate(zip(rows.topics, partitions, strict=True)):
        by_partition.setdefault(place, []).append(row)
    groups = list(by_partition.values())
    topics, numbers = zip(*by_partition, strict=True)
    return topics, numbers, list(map(len, groups)), _flat(groups)


def _flat(groups: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(groups))


def _ordered(values: list[Any], order: Sequence[int] | None) -> list[Any]:
    return values if order is None else list(map(values.__getitem__, order))


def _column(
    values: dict[int, bytes], rows: PendingRows, order: Sequence[int] | None
) -> list[bytes | None] | None:
    if not values:
        return None
    return list(map(values.get, range(len(rows)) if order is None else order))


def _tags_column(rows: PendingRows, order: Sequence[int] | None) -> list[Mapping[str, str]] | None:
    if not rows.tags:
        return None
    tags = rows.tags
    return [tags.get(row, NO_TAGS) for row in (range(len(rows)) if order is None else order)]


def codec_of(compression: str | None) -> Codec:
    try:
        return _CODECS[compression]
    except KeyError:
        raise ClientFault(f"compression {compression!r} is unknown: None, 'lz4', 'zstd'") from None


def tags_size(tags: Mapping[str, str]) -> int:
    return sum(len(name) + len(value) for name, value in tags.items())
