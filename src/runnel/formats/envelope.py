"""The envelope of a batch: which runs it holds and where they lie, apart from the body.

A run is messages of one topic and partition with consecutive offsets; the rows of a batch form
runs. The envelope is one msgpack array:

    0   version          1
    1   topics           array of str, one per run
    2   partitions       bin: i32 per run
    3   counts           bin: i32 per run, messages in it, at least 1
    4   base_offsets     bin: i64 per run, the offset of its first message } empty in a batch
    5   receive_times    bin: i64 per run, ns                              } on its way to the
    6   epochs           bin: i64 per run                                  } broker, which
    7   entries          bin: i64 per run                                  } fills them in
    8   rows             bin: i32 per run, the row of its first message in its entry as that was
                         first stored; empty: nothing was cut out, the runs follow each other
                         from row 0 on
    9   shard            int
    10  producer         str or nil
    11  term             int, 0 without a producer
    12  number           int, 0 without a producer
    13  codec            0 none, 1 lz4 block, 2 zstd frame
    14  body_bytes       int, size of the body uncompressed
    15  body_crc         int, CRC-32C of the body as it is carried, compressed or not

Integer columns are little-endian. A column of one value stands for all runs: a thousand runs of
one message each, in one partition, received together, cost their names and base offsets and little
else.
"""

from __future__ import annotations

import enum
import re
import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, Final, Literal, NewType, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from runnel.errors import MalformedError

Offset = NewType("Offset", int)
PartitionId = NewType("PartitionId", int)

VERSION: Final = 1
RUNS_MAX: Final = 65_536
# int32 offsets could describe 2 GiB; a header must not make a reader allocate that much.
BODY_BYTES_CEILING: Final = 64 * 2**20

# Far enough below the limits of their types that adding a batch's count cannot overflow.
OFFSET_MAX: Final = 2**63 - 2**32
ROW_MAX: Final = 2**30

# The number of cached beginnings of envelopes, each as long as its topic's name and some 40 bytes.
_KEPT_FRONTS: Final = 1024

# One number of a column. Half the time of int.from_bytes.
_INT32: Final = struct.Struct("<i")
_INT64: Final = struct.Struct("<q")
_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
_INT64_MIN: Final = -(2**63)


class Codec(enum.IntEnum):
    """How a body is compressed."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


_CODECS: Final = frozenset(codec.value for codec in Codec)


_Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """The runs of a batch, its producer, and its body's codec, size and checksum.

    Columns are raw bytes; the methods return them as numbers. The bounds are checked when an envelope is
    decoded, not when it is made.
    """

    version: int
    topics: Annotated[list[str], msgspec.Meta(min_length=1, max_length=RUNS_MAX)]
    partitions: bytes
    counts: bytes
    base_offsets: bytes
    receive_times: bytes
    epochs: bytes
    entries: bytes
    rows: bytes
    shard: _Natural
    producer: str | None
    term: _Natural
    number: _Natural
    codec: _Natural
    body_bytes: Annotated[int, msgspec.Meta(ge=1, le=BODY_BYTES_CEILING)]
    body_crc: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

    @property
    def run_count(self) -> int:
        return len(self.topics)

    @property
    def message_count(self) -> int:
        if len(self.counts) == 4:
            count: int = _INT32.unpack(self.counts)[0]
            return count * len(self.topics)
        return int(np.frombuffer(self.counts, np.int32).sum(dtype=np.int64))

    @property
    def is_stored(self) -> bool:
        """Whether the broker has given the messages offsets."""
        return len(self.base_offsets) > 0

    def column32(self, column: bytes) -> list[int]:
        """A 32-bit column as one number per run."""
        if len(column) == 4:
            return list(_INT32.unpack(column)) * len(self.topics)
        values: list[int] = memoryview(column).cast("i").tolist()
        return values

    def column64(self, column: bytes) -> list[int]:
        """A 64-bit column as one number per run."""
        if len(column) == 8:
            return list(_INT64.unpack(column)) * len(self.topics)
        values: list[int] = memoryview(column).cast("q").tolist()
        return values

    def vector32(self, column: bytes) -> NDArray[np.int32]:
        """A 32-bit column as a vector of one number per run."""
        vector = np.frombuffer(column, np.int32)
        return vector if len(vector) == len(self.topics) else vector.repeat(len(self.topics))

    def vector64(self, column: bytes) -> NDArray[np.int64]:
        """A 64-bit column as a vector of one number per run."""
        vector = np.frombuffer(column, np.int64)
        return vector if len(vector) == len(self.topics) else vector.repeat(len(self.topics))

    @property
    def run_rows(self) -> list[int]:
        """The row of each run's first message in its entry as it was first stored."""
        if self.rows:
            return self.column32(self.rows)
        return [0, *accumulate(self.column32(self.counts)[:-1])]

    def run_starts(self) -> NDArray[np.int64]:
        """Where each run begins in this batch's rows, and where the last ends: n + 1 numbers."""
        starts = np.zeros(len(self.topics) + 1, np.int64)
        np.cumsum(self.vector32(self.counts), out=starts[1:])
        return starts

    @property
    def is_one_partition(self) -> bool:
        """Whether all runs are of one topic and partition, and received together, as in a selection from one run."""
        topics = self.topics
        return (
            len(self.partitions) == 4
            and len(self.receive_times) == 8
            and topics.count(topics[0]) == len(topics)
        )

    def offsets(self) -> NDArray[np.int64]:
        """The offset of each message of a stored batch."""
        starts = self.run_starts()
        ahead: NDArray[np.int64] = self.vector64(self.base_offsets) - starts[:-1]
        return np.arange(starts[-1]) + ahead.repeat(self.vector32(self.counts))

    @property
    def entry(self) -> int:
        """The entry of the last run: the position of a shard's reader after this batch."""
        return int.from_bytes(self.entries[-8:], "little")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def published(
    topics: Sequence[str],
    counts: Sequence[int],
    *,
    partitions: Sequence[int] = (0,),
    shard: int = 0,
    producer: str | None = None,
    term: int = 0,
    number: int = 0,
    codec: Codec = Codec.NONE,
    body_bytes: int,
    body_crc: int,
) -> Envelope:
    """The envelope of a batch on its way to the broker."""
    for name, value in (("shard", shard), ("term", term), ("number", number)):
        if type(value) is not int or not 0 <= value <= _INT64_MAX:
            raise MalformedError(
                f"envelope {name}", f"{value!r} is not an integer of 0 to {_INT64_MAX}"
            )
    if producer is None and (term or number):
        raise MalformedError("envelope producer", f"missing, although {term=}, {number=}")
    if producer is not None and not isinstance(producer, str):
        raise MalformedError("envelope producer", f"{producer!r} is not text")
    if not all([isinstance(topic, str) for topic in topics]):  # noqa: C419 - half the time of a generator
        wrong = next(topic for topic in topics if not isinstance(topic, str))
        raise MalformedError("envelope topics", f"{wrong!r} is not text")
    envelope = Envelope(
        version=VERSION,
        topics=list(topics),
        partitions=pack32(partitions),
        counts=pack32(counts),
        base_offsets=b"",
        receive_times=b"",
        epochs=b"",
        entries=b"",
        rows=b"",
        shard=shard,
        producer=producer,
        term=term,
        number=number,
        codec=codec,
        body_bytes=body_bytes,
        body_crc=body_crc,
    )
    check(envelope)
    return envelope


def pack32(values: Sequence[int]) -> bytes:
    """A 32-bit column; one value where all are equal."""
    return _pack("i", values)


def pack64(values: Sequence[int]) -> bytes:
    """A 64-bit column; one value where all are equal."""
    return _pack("q", values)


def _pack(code: Literal["i", "q"], values: Sequence[int]) -> bytes:
    try:
        return array(code, values[:1] if _all_equal(values) else values).tobytes()
    except (OverflowError, TypeError) as error:
        raise MalformedError("envelope", f"a number does not fit its column: {error}") from None


def _all_equal(values: Sequence[int]) -> bool:
    return len(values) > 1 and values.count(values[0]) == len(values)


def encode(envelope: Envelope) -> bytes:
    try:
        return _encoder.encode(envelope)
    except UnicodeEncodeError as error:
        raise MalformedError("envelope", f"a name is not valid UTF-8: {error}") from None


def encode_plain(
    topic: str, partition: int, count: int, shard: int, body_bytes: int, body_crc: int
) -> bytes:
    """The encoded envelope of a batch to publish that has one run, an uncompressed body and no producer."""
    front = _plain_front(topic, partition, count, shard)
    return front + _encoder.encode(body_bytes) + _encoder.encode(body_crc)


@lru_cache(maxsize=_KEPT_FRONTS)
def _plain_front(topic: str, partition: int, count: int, shard: int) -> bytes:
    """Such an envelope up to its last two fields: only these differ between batches of one publisher."""
    last = BODY_BYTES_CEILING, 2**32 - 1
    sample = published(
        (topic,),
        (count,),
        partitions=(partition,),
        shard=shard,
        body_bytes=last[0],
        body_crc=last[1],
    )
    return encode(sample)[: -sum(len(_encoder.encode(number)) for number in last)]


def decode(data: bytes | memoryview, *, body_bytes_max: int = BODY_BYTES_CEILING) -> Envelope:
    """Read and check an envelope. MalformedError names the field that is wrong."""
    try:
        envelope = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _explained(data, error) from None
    if envelope.version != VERSION:
        raise _unknown_version(envelope.version)
    if envelope.codec not in _CODECS:
        raise MalformedError("envelope codec", f"{envelope.codec} is unknown; 0, 1 and 2 are known")
    if envelope.producer is None and (envelope.term or envelope.number):
        raise MalformedError("envelope producer", "missing, although it has a term or a number")
    check(envelope, body_bytes_max=body_bytes_max)
    return envelope


def check(envelope: Envelope, *, body_bytes_max: int = BODY_BYTES_CEILING) -> None:
    """Raise MalformedError unless the columns fit the runs, and the runs fit the body."""
    count = _plain_count(envelope)
    if not count:
        _check_columns(envelope, len(envelope.topics))
        count = envelope.message_count
    # Every row needs 4 bytes of payload offsets, so a count that the body cannot hold shows here.
    if not 4 * (count + 1) <= envelope.body_bytes <= body_bytes_max:
        raise _size_error(envelope.body_bytes, count, body_bytes_max)


def _size_error(body_bytes: int, count: int, body_bytes_max: int) -> MalformedError:
    if not 1 <= body_bytes <= body_bytes_max:
        return MalformedError(
            "envelope body_bytes", f"{body_bytes}; 1 to {body_bytes_max} are allowed"
        )
    return MalformedError("envelope counts", f"{count} messages cannot be in {body_bytes} bytes")


def _plain_count(envelope: Envelope) -> int:
    """The number of messages, if every column is one valid number or left to the broker: a quick test.

    0 if not: then `_check_columns` finds what is wrong, if anything (bench/log.py).
    """
    partitions, counts, base_offsets = envelope.partitions, envelope.counts, envelope.base_offsets
    times, epochs, entries = envelope.receive_times, envelope.epochs, envelope.entries
    if len(partitions) != 4 or len(counts) != 4 or envelope.rows:
        return 0
    if base_offsets:
        if len(base_offsets) != 8 or len(times) != 8 or len(epochs) != 8 or len(entries) != 8:
            return 0
        if not 1 <= _INT64.unpack(base_offsets)[0] <= OFFSET_MAX:
            return 0
        if _INT64.unpack(epochs)[0] < 0 or _INT64.unpack(entries)[0] < 1:
            return 0
    elif times or epochs or entries:
        return 0
    runs = len(envelope.topics)
    count: int = _INT32.unpack(counts)[0]
    if _INT32.unpack(partitions)[0] < 0 or count < 1 or runs > RUNS_MAX:
        return 0
    return count * runs


def _check_columns(envelope: Envelope, runs: int) -> None:
    if not 1 <= runs <= RUNS_MAX:
        raise MalformedError("envelope topics", f"{runs} runs; 1 to {RUNS_MAX} are allowed")
    _check_column("partitions", envelope.partitions, 4, runs, 0, _INT32_MAX)
    _check_column("counts", envelope.counts, 4, runs, 1, _INT32_MAX)
    if envelope.base_offsets:
        _check_column("base_offsets", envelope.base_offsets, 8, runs, 1, OFFSET_MAX)
        _check_column("receive_times", envelope.receive_times, 8, runs, _INT64_MIN, _INT64_MAX)
        _check_column("epochs", envelope.epochs, 8, runs, 0, _INT64_MAX)
        _check_column("entries", envelope.entries, 8, runs, 1, _INT64_MAX)
        if envelope.rows:
            _check_column("rows", envelope.rows, 4, runs, 0, ROW_MAX)
    elif envelope.receive_times or envelope.epochs or envelope.entries or envelope.rows:
        raise MalformedError(
            "envelope base_offsets", "missing, although other fields of the broker are set"
        )


def _check_column(
    name: str, column: bytes, width: int, runs: int, lowest: int, highest: int
) -> None:
    if len(column) == width:
        least = most = int.from_bytes(column, "little", signed=True)
    elif len(column) == width * runs:
        vector = np.frombuffer(column, np.int32 if width == 4 else np.int64)
        least, most = int(vector.min()), int(vector.max())
    else:
        raise MalformedError(
            f"envelope {name}",
            f"{len(column)} bytes; {runs} runs need {width * runs}, or {width} for all",
        )
    if least < lowest:
        raise MalformedError(f"envelope {name}", f"{least} is below {lowest}")
    if most > highest:
        raise MalformedError(f"envelope {name}", f"{most} is above {highest}")


def run_prefix(envelope: Envelope, run: int) -> str:
    """The beginning of an error about a run: empty if the batch has only one run."""
    return f"run {run}: " if envelope.run_count > 1 else ""


def _explained(data: bytes | memoryview, error: Exception) -> MalformedError:
    """The error that names the wrong field, or the version if that is later: it may have other fields."""
    head = bytes(memoryview(data)[:4])
    if head[:1] == b"\xdc" and len(head) == 4 and VERSION < head[3] < 0x80:
        return _unknown_version(head[3])
    # msgspec names an element by its number, as in "… - at `$[3]`".
    found = re.search(r"at `\$\[(\d+)\]", str(error))
    place = f"envelope {Envelope.__struct_fields__[int(found[1])]}" if found else "envelope"
    return MalformedError(place, str(error))


def _unknown_version(version: int) -> MalformedError:
    return MalformedError(
        "envelope version", f"{version} is unknown; this Runnel reads version {VERSION}"
    )
