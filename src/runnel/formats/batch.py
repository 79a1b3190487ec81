"""The batch: a small table of messages, decoded when first used."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, repeat
from operator import add
from types import ModuleType
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from runnel.errors import LimitExceededError, MalformedError
from runnel.formats import block, columns, compression, envelope, plain_bodies, selection
from runnel.formats.checksum import crc32c
from runnel.formats.columns import Columns
from runnel.formats.envelope import BODY_BYTES_CEILING, Codec, Envelope
from runnel.formats.message import NO_TAGS, Message
from runnel.formats.plain_bodies import EvenShape

if TYPE_CHECKING:
    import pyarrow

_Value = TypeVar("_Value")

_UNSET: Final = bytes(8)
_INT32: Final = struct.Struct("<i")
_ONE: Final = _INT32.pack(1)
_STORED: Final = struct.Struct("<qqqq")  # base offset, receive time, epoch, entry
_PLAIN: Final = Codec.NONE.value  # an enum's member takes several times as long to look up


class Run(msgspec.Struct, frozen=True, gc=False):
    """Messages of one topic and partition with consecutive offsets, neighbours in a batch."""

    topic: str
    partition: int
    count: int
    base_offset: int
    receive_time_ns: int
    epoch: int
    entry: int
    row: int


class Batch:
    """Messages in runs. Iterate for `Message`s; `to_arrow()` for columns; `len()` for how many.

    It holds the envelope and the body's bytes. The body is decoded when first needed, and the result kept.
    """

    __slots__ = ("_columns", "_run", "body", "envelope")

    def __init__(
        self, envelope: Envelope, body: bytes | memoryview, columns: Columns | None = None
    ) -> None:
        self.envelope = envelope
        self.body = body
        self._columns = columns
        self._run: Run | None = None  # of a batch of one run, once it was used

    # --- Making ---

    @classmethod
    def from_columns(
        cls,
        table: Columns,
        topics: Sequence[str],
        counts: Sequence[int],
        *,
        partitions: Sequence[int] = (0,),
        shard: int = 0,
        producer: str | None = None,
        term: int = 0,
        number: int = 0,
        codec: Codec = Codec.NONE,
    ) -> Batch:
        """A batch to publish: the table's rows form runs of `topics`, `partitions`, `counts`.

        One partition, or one count, stands for all runs.
        """
        if len(partitions) not in (1, len(topics)) or len(counts) not in (1, len(topics)):
            raise MalformedError("runs", "topics, partitions and counts must be of one length")
        if sum(counts) * (len(topics) if len(counts) == 1 else 1) != table.count:
            raise MalformedError("runs", f"counts do not add up to {table.count} messages")
        body = _encoded(table)
        packed = compression.compress(body, codec)
        head = envelope.published(
            topics,
            counts,
            partitions=partitions,
            shard=shard,
            producer=producer,
            term=term,
            number=number,
            codec=codec,
            body_bytes=len(body),
            body_crc=crc32c(packed),
        )
        return cls(head, packed, table)

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Message],
        *,
        codec: Codec = Codec.NONE,
        producer: str | None = None,
        term: int = 0,
        number: int = 0,
    ) -> Batch:
        """A batch to publish. Neighbours of one topic and partition make a run.

        Offsets and receive times are dropped: the broker assigns them.
        """
        try:
            topics, partitions, counts = _runs_of(messages)
        except AttributeError as error:
            raise MalformedError("messages", f"one of them is not a Message: {error}") from None
        keys = [message.key for message in messages]
        partition_keys = [message.partition_key for message in messages]
        table = columns.build(
            [message.payload for message in messages],
            event_times_ns=[message.event_time_ns for message in messages],
            transmit_time_ns=_one_or_all([message.transmit_time_ns for message in messages]),
            keys=keys,
            partition_keys=_explicit(partition_keys, keys),
            uids=[message.uid for message in messages],
            tags=[message.tags for message in messages],
        )
        return cls.from_columns(
            table,
            topics,
            counts,
            partitions=partitions,
            codec=codec,
            producer=producer,
            term=term,
            number=number,
        )

    @classmethod
    def unpack(
        cls,
        data: bytes | memoryview,
        position: int = 0,
        *,
        body_bytes_max: int = BODY_BYTES_CEILING,
    ) -> Batch:
        """The batch whose block begins at `position`. Both checksums are verified here."""
        head, body, _ = block.unpack(data, position, body_bytes_max=body_bytes_max)
        return cls(head, body)

    @classmethod
    def join(cls, batches: Sequence[Batch]) -> Batch:
        """One batch with the messages of all, in this order. They must be of one shard."""
        if not batches:
            raise MalformedError("batches", "none to join")
        if len(batches) == 1:
            return batches[0]
        joined = _sealed(
            selection.join_envelopes([batch.envelope for batch in batches]),
            selection.join_columns([batch.columns for batch in batches]),
        )
        envelope.check(joined.envelope)
        return joined

    # --- Bytes ---

    def pack(self) -> bytes:
        """The block that goes into a frame and, with offsets filled in, into a file."""
        return b"".join(block.pack(envelope.encode(self.envelope), self.body))

    def __reduce__(self) -> tuple[Callable[[bytes], Batch], tuple[bytes]]:
        return (Batch.unpack, (self.pack(),))

    def uncompressed(self) -> Batch:
        """The same batch with a plain body; itself if it has one."""
        if self.envelope.codec == Codec.NONE:
            return self
        body = compression.decompress(self.body, self.envelope.codec, self.envelope.body_bytes)
        head = msgspec.structs.replace(self.envelope, codec=Codec.NONE, body_crc=crc32c(body))
        return Batch(head, body, self._columns)

    @property
    def columns(self) -> Columns:
        """The body as columns: views into its bytes."""
        if self._columns is None:
            head = self.envelope
            body = self.body
            if head.codec != _PLAIN or len(body) != head.body_bytes:
                body = compression.decompress(body, head.codec, head.body_bytes)
            self._columns = columns.decode(body, head.message_count)
        return self._columns

    def check(self) -> bool:
        """Raise MalformedError if the body cannot be read; returns whether it is plain.

        Most plain bodies are recognised without their columns.
        """
        if self._columns is None:
            head, body = self.envelope, self.body
            is_whole = head.codec == _PLAIN and len(body) == head.body_bytes
            if is_whole and plain_bodies.is_known_plain(body, head.message_count):
                return True
        return self.columns.is_plain

    # --- Reading ---

    def __len__(self) -> int:
        return self.envelope.message_count

    def __iter__(self) -> Iterator[Message]:
        if self._columns is None:
            only = self._only_message()
            if only is not None:
                return iter((only,))
        # Each message is made when it is asked for. If the caller has dropped the one before, its memory is reused
        # while it is still in the cache, and a loop over all of them takes an eighth less time.
        table = self.columns
        count = table.count
        keys = table.keys.each(count)
        partition_keys = table.partition_keys.each(count) if table.partition_keys else keys
        topics, partitions, offsets, receive_times = self._by_row()
        return map(
            Message,
            topics,
            table.payloads.to_list(),
            keys,
            table.tags_list(),
            table.each_time(table.event_times),
            table.each_time(table.transmit_times),
            receive_times,
            partitions,
            offsets,
            table.uid_list(),
            partition_keys,
        )

    def __repr__(self) -> str:
        runs = self.envelope.run_count
        first = self.envelope.topics[0]
        where = first if runs == 1 else f"{first} … {self.envelope.topics[-1]}, {runs} runs"
        if self.envelope.is_stored and runs == 1:
            base = self.envelope.column64(self.envelope.base_offsets)[0]
            partition = self.envelope.column32(self.envelope.partitions)[0]
            where += f"[{partition}]@{base}…{base + len(self) - 1}"
        return f"<Batch {len(self)} messages of {where}, {self.envelope.body_bytes} bytes>"

    def runs(self) -> list[Run]:
        """The runs in the order of the rows; fields that the broker has not filled in are 0."""
        head = self.envelope
        if len(head.topics) == 1:
            return [self._only_run()]
        stored = (
            (head.base_offsets, head.receive_times, head.epochs, head.entries)
            if head.is_stored
            else (_UNSET, _UNSET, _UNSET, _UNSET)
        )
        return list(
            map(
                Run,
                head.topics,
                head.column32(head.partitions),
                head.column32(head.counts),
                *map(head.column64, stored),
                head.run_rows,
            )
        )

    def _only_run(self) -> Run:
        """The run of a batch of one run, in a quarter of the time."""
        if self._run is None:
            head = self.envelope
            (partition,) = _INT32.unpack(head.partitions)
            (count,) = _INT32.unpack(head.counts)
            base_offset = receive_time_ns = epoch = entry = row = 0
            if head.base_offsets:
                base_offset, receive_time_ns, epoch, entry = _STORED.unpack(
                    head.base_offsets + head.receive_times + head.epochs + head.entries
                )
            if head.rows:
                (row,) = _INT32.unpack(head.rows)
            self._run = Run(
                head.topics[0], partition, count, base_offset, receive_time_ns, epoch, entry, row
            )
        return self._run

    def _only_message(self) -> Message | None:
        """The message of a batch of one, made without columns; None if it has more than a payload and times.

        Where messages come one by one, it takes a third of the time of `columns` and a row of them (bench/latency.py).
        """
        head, body = self.envelope, self.body
        if len(head.topics) > 1 or head.counts != _ONE or head.codec != _PLAIN:
            return None
        row = plain_bodies.plain_row(body) if len(body) == head.body_bytes else None
        if row is None:
            return None
        event_time_ns, transmit_time_ns, payload_end = row
        run = self._only_run()
        return Message(
            run.topic,
            bytes(body[plain_bodies.PLAIN_ROW_PAYLOAD_AT : payload_end]),
            None,
            NO_TAGS,
            event_time_ns,
            transmit_time_ns,
            run.receive_time_ns,
            run.partition,
            run.base_offset,
        )

    def messages(self) -> list[Message]:
        """All messages as objects. Several times quicker than one by one."""
        return list(self)

    def message(self, row: int) -> Message:
        """One message as an object. For all of them, `messages` is quicker."""
        if len(self.envelope.topics) > 1 or not self.envelope.is_stored:
            return self.slice(row, row + 1).messages()[0]
        run = self._only_run()
        table = self.columns
        key = table.keys.at(row)
        return Message(
            run.topic,
            table.payloads.at(row) or b"",
            key,
            table.tags_at(row),
            table.time_at(table.event_times, row),
            table.time_at(table.transmit_times, row),
            run.receive_time_ns,
            run.partition,
            run.base_offset + row,
            table.uid_at(row),
            table.partition_keys.at(row) if table.partition_keys else key,
        )

    def _by_row(self) -> tuple[Iterable[str], Iterable[int], Iterable[int], Iterable[int]]:
        """Topics, partitions, offsets and receive times of the runs, repeated for each row."""
        head = self.envelope
        if len(head.topics) == 1 and head.is_stored:  # the common case, and a third quicker
            run = self._only_run()
            return (
                repeat(run.topic),
                repeat(run.partition),
                range(run.base_offset, run.base_offset + run.count),
                repeat(run.receive_time_ns),
            )
        if head.is_one_partition:
            return (
                repeat(head.topics[0]),
                repeat(int.from_bytes(head.partitions, "little")),
                head.offsets().tolist(),
                repeat(int.from_bytes(head.receive_times, "little", signed=True)),
            )
        counts = head.column32(head.counts)

        def spread(values: Iterable[_Value]) -> Iterable[_Value]:
            if len(counts) == len(self):
                return values  # one message per run
            return chain.from_iterable(map(repeat, values, counts))

        topics = spread(head.topics)
        partitions = spread(head.column32(head.partitions))
        if not head.is_stored:
            return topics, partitions, repeat(0), repeat(0)
        bases = head.column64(head.base_offsets)
        offsets = chain.from_iterable(map(range, bases, map(add, bases, counts)))
        return topics, partitions, offsets, spread(head.column64(head.receive_times))

    def to_arrow(self) -> pyarrow.RecordBatch:
        """The batch as a pyarrow.RecordBatch over the same memory: `pip install '.[arrow]'`."""
        return _arrow().to_record_batch(self.envelope, self.columns)

    @staticmethod
    def table(batches: Iterable[Batch]) -> pyarrow.Table:
        """Several batches as a pyarrow.Table over the same memory, quicker than one by one."""
        batches = list(batches)
        heads = [batch.envelope for batch in batches]
        bodies = [batch.body for batch in batches]
        shape = _common_shape(heads, bodies)
        if shape is not None:
            return _arrow().to_even_table(heads, bodies, shape)
        return _arrow().to_table(heads, [batch.columns for batch in batches])

    # --- Selecting ---

    def take(self, rows: Sequence[int] | selection.Vector) -> Batch:
        """A batch of these rows, whose numbers must rise."""
        return self._select(selection.rows_of_index(rows, len(self)))

    def cut(self, runs: Sequence[int] | selection.Vector) -> Batch:
        """A batch of these runs, whose numbers must rise. Itself if they are all of its runs."""
        return self._select(selection.rows_of_runs(runs, self.envelope.run_starts()))

    def slice(self, begin: int, end: int | None = None) -> Batch:
        """A batch of the rows `begin` to `end` (not included), counted from 0. Itself if they are all of its rows."""
        count = len(self)
        end = count if end is None else end
        if not 0 <= begin < end <= count:
            raise MalformedError("slice", f"rows {begin} to {end} of {count}")
        return self._select(selection.rows_of_range(begin, end))

    def _select(self, rows: selection.Rows) -> Batch:
        if rows.count == len(self):
            return self
        return _sealed(
            selection.select_envelope(self.envelope, rows),
            selection.select_columns(self.columns, rows),
        )


def _encoded(table: Columns) -> bytes:
    body = columns.encode(table)
    if len(body) > BODY_BYTES_CEILING:
        raise LimitExceededError(f"a batch of {len(body)} bytes; at most {BODY_BYTES_CEILING}")
    return body


def _sealed(head: Envelope, table: Columns) -> Batch:
    """A batch of selected or joined runs and rows. They are valid as in their sources, unless there are too many."""
    body = _encoded(table)
    head = msgspec.structs.replace(head, body_bytes=len(body), body_crc=crc32c(body))
    if head.run_count > envelope.RUNS_MAX:
        envelope.check(head)
    return Batch(head, body, table)


def _common_shape(
    heads: Sequence[Envelope], bodies: Sequence[bytes | memoryview]
) -> EvenShape | None:
    """The shape of plain bodies with equal counts and payloads of one length, often of one producer; else None."""
    if not heads or heads[0].codec != _PLAIN:
        return None
    runs, counts = len(heads[0].topics), heads[0].counts
    shape = plain_bodies.even_shape(bodies[0], heads[0].message_count)
    if shape is None:
        return None
    for head, body in zip(heads, bodies, strict=True):
        is_alike = head.counts == counts and len(head.topics) == runs and head.codec == _PLAIN
        if not is_alike or not shape.fits(body):
            return None
    return shape


@cache
def _arrow() -> ModuleType:
    """Import the only module that needs pyarrow, which is optional."""
    try:
        from runnel.formats import arrow
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Arrow needs pyarrow: pip install '.[arrow]'", name=error.name
        ) from None
    return arrow


def unpack_blocks(data: bytes | memoryview) -> list[Batch]:
    """The batches of blocks that follow each other. Their checksums are verified here."""
    batches = []
    position = 0
    while position < len(data):
        head, body, block_bytes = block.unpack(data, position)
        batches.append(Batch(head, body))
        position += block_bytes
    return batches


def _runs_of(messages: Sequence[Message]) -> tuple[list[str], list[int], list[int]]:
    if not messages:
        raise MalformedError("batch", "has no messages; at least one is needed")
    topics = [message.topic for message in messages]
    partitions = [message.partition for message in messages]
    count = len(messages)
    if topics.count(topics[0]) == count and partitions.count(partitions[0]) == count:
        return topics[:1], partitions[:1], [count]
    begins = [0]
    begins += [
        row
        for row in range(1, count)
        if topics[row] != topics[row - 1] or partitions[row] != partitions[row - 1]
    ]
    counts = [end - begin for begin, end in zip(begins, [*begins[1:], count], strict=True)]
    return [topics[row] for row in begins], [partitions[row] for row in begins], counts


def _one_or_all(values: list[int]) -> list[int]:
    return values[:1] if values.count(values[0]) == len(values) else values


def _explicit(
    partition_keys: list[bytes | None], keys: list[bytes | None]
) -> list[bytes | None] | None:
    """The partition keys, with the key for absent ones; None if none differs from its key."""
    if partition_keys == keys or partition_keys.count(None) == len(partition_keys):
        return None
    return [
        key if explicit is None else explicit
        for explicit, key in zip(partition_keys, keys, strict=True)
    ]
