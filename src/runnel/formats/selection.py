"""Selects rows of batches, and joins batches: every result is a valid batch.

Rows keep what their run says: topic, partition, offsets, times, epoch, entry and the row in that
entry. A run whose rows are no longer neighbours becomes several runs. The result has no producer
fields: it is not what the producer sent, and must not be taken for a retry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from runnel.errors import LimitExceededError, MalformedError
from runnel.formats.envelope import BODY_BYTES_CEILING, Codec, Envelope, pack32, pack64
from runnel.formats.message import NO_TAGS
from runnel.formats.table import EMPTY, UID_BYTES, Binary, Columns, pack_bits, unpack_bits

Vector = NDArray[np.int64]


# Scattered rows of at most this many bytes on average are picked byte by byte.
_PICKED_BYTES_MAX: Final = 16


class Rows(msgspec.Struct, frozen=True, gc=False):
    """Selected rows of a batch, as ranges of neighbours and as an index for numpy."""

    begins: Vector
    ends: Vector
    index: Vector | slice
    count: int


def rows_of_range(begin: int, end: int) -> Rows:
    return Rows(np.array([begin]), np.array([end]), slice(begin, end), end - begin)


def rows_of_index(rows: Sequence[int] | Vector, count: int) -> Rows:
    """Rows by their numbers, which must rise: a batch keeps its messages in order."""
    index = _rising("rows", rows, count)
    is_break = index[1:] - index[:-1] != 1
    begins = index[np.concatenate(([True], is_break))]
    ends = index[np.concatenate((is_break, [True]))] + 1
    if len(begins) == 1:
        return rows_of_range(int(begins[0]), int(ends[0]))
    return Rows(begins, ends, index, len(index))


def rows_of_runs(runs: Sequence[int] | Vector, starts: Vector) -> Rows:
    """All rows of the given runs, which must rise; `starts` is the envelope's `run_starts`."""
    chosen = _rising("runs", runs, len(starts) - 1)
    begins, ends = starts[chosen], starts[chosen + 1]
    if ends[-1] - begins[0] == (ends - begins).sum():  # neighbours
        return rows_of_range(int(begins[0]), int(ends[-1]))
    index = _spread(begins, ends - begins)
    return Rows(begins, ends, index, len(index))


def _rising(name: str, numbers: Sequence[int] | Vector, count: int) -> Vector:
    vector = np.asarray(numbers, np.int64)
    if vector.ndim != 1 or not len(vector):
        raise MalformedError(name, "none were asked for; a batch has at least one message")
    if np.count_nonzero(vector[1:] <= vector[:-1]):
        raise MalformedError(name, "must rise: a batch keeps its messages in order")
    if vector[0] < 0 or vector[-1] >= count:
        raise MalformedError(name, f"{vector[0]} to {vector[-1]} are not all in 0 to {count - 1}")
    return vector


def _spread(begins: Vector, counts: Vector) -> Vector:
    """Consecutive numbers from each beginning on: (5, 9) with counts (2, 3) gives 5, 6, 9, 10, 11."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(begins - ends + counts, counts)


# --- Columns ---


def select_columns(columns: Columns, rows: Rows) -> Columns:
    """Columns of these rows alone. Buffers that need no change are shared."""
    tag_index, tag_sets = _used_tags(
        _select_fixed(columns.tag_index, 4, rows, columns.count), columns.tag_sets
    )
    return Columns(
        count=rows.count,
        event_times=_select_fixed(columns.event_times, 8, rows, columns.count),
        transmit_times=_select_fixed(columns.transmit_times, 8, rows, columns.count),
        payloads=_select_binary(columns.payloads, rows),
        keys=_select_binary(columns.keys, rows),
        partition_keys=_select_binary(columns.partition_keys, rows),
        uids=_select_fixed(columns.uids, UID_BYTES, rows, columns.count),
        tag_index=tag_index,
        tag_sets=tag_sets,
    )


def _select_fixed(column: memoryview, width: int, rows: Rows, count: int) -> memoryview:
    if len(column) != width * count:
        return column  # absent, or one value for all
    if isinstance(rows.index, slice):
        return column[width * rows.index.start : width * rows.index.stop]
    return memoryview(np.frombuffer(column, f"V{width}")[rows.index].tobytes())


def _select_binary(column: Binary, rows: Rows) -> Binary:
    if not column:
        return column
    offsets = np.frombuffer(column.offsets, np.int32)
    if isinstance(rows.index, slice):
        begin, end = rows.index.start, rows.index.stop
        selected = offsets[begin : end + 1] - offsets[begin]
        data = column.data[int(offsets[begin]) : int(offsets[end])]
    else:
        selected = np.zeros(rows.count + 1, np.int32)
        np.cumsum((offsets[1:] - offsets[:-1])[rows.index], out=selected[1:])
        data = _pick_data(column, offsets, rows, int(selected[-1]))
    validity = EMPTY
    if column.validity:
        validity = pack_bits(unpack_bits(column.validity, len(offsets) - 1)[rows.index])
    return Binary(selected.data.cast("B"), data, validity, column.width)


def _pick_data(
    column: Binary, offsets: NDArray[np.int32], rows: Rows, data_bytes: int
) -> memoryview:
    """The bytes of scattered rows, by the quickest way for their lengths (bench/queue.py, "work", key_shared)."""
    if column.width:
        return memoryview(np.frombuffer(column.data, f"V{column.width}")[rows.index].tobytes())
    begins, ends = offsets[rows.begins].astype(np.int64), offsets[rows.ends].astype(np.int64)
    if data_bytes <= _PICKED_BYTES_MAX * len(begins):
        return memoryview(
            np.frombuffer(column.data, np.uint8)[_spread(begins, ends - begins)].tobytes()
        )
    cuts = zip(begins.tolist(), ends.tolist(), strict=True)
    return memoryview(b"".join([column.data[begin:end] for begin, end in cuts]))


def _used_tags(
    tag_index: memoryview, tag_sets: tuple[Mapping[str, str], ...]
) -> tuple[memoryview, tuple[Mapping[str, str], ...]]:
    """The index and the tag sets that are in use, renumbered; a single 0 if one set is left."""
    if not tag_index:
        return EMPTY, ()
    used, index = np.unique(np.frombuffer(tag_index, np.int32), return_inverse=True)
    numbers = index[:1] if len(used) == 1 else index
    return (
        memoryview(numbers.astype(np.int32).tobytes()),
        tuple(tag_sets[number] for number in used.tolist()),
    )


def join_columns(parts: Sequence[Columns]) -> Columns:
    """The rows of all parts, one after another."""
    tag_index, tag_sets = _join_tags(parts)
    return Columns(
        count=sum(part.count for part in parts),
        event_times=_join_times([(part.event_times, part.count) for part in parts]),
        transmit_times=_join_times([(part.transmit_times, part.count) for part in parts]),
        payloads=_join_binary([(part.payloads, part.count) for part in parts]),
        keys=_join_binary([(part.keys, part.count) for part in parts]),
        partition_keys=_join_partition_keys(parts),
        uids=_join_uids(parts),
        tag_index=tag_index,
        tag_sets=tag_sets,
    )


def _join_times(parts: list[tuple[memoryview, int]]) -> memoryview:
    first = parts[0][0]
    if len(first) == 8 and all(column == first for column, _ in parts):
        return first
    columns = [
        column if len(column) == 8 * count else bytes(column) * count for column, count in parts
    ]
    return memoryview(b"".join(columns))


def _join_binary(parts: list[tuple[Binary, int]]) -> Binary:
    if not any(column for column, _ in parts):
        return Binary()
    data_bytes = sum(len(column.data) for column, _ in parts)
    if data_bytes > BODY_BYTES_CEILING:  # before its offsets outgrow 32 bits
        raise LimitExceededError(f"{data_bytes} bytes to join; a batch holds {BODY_BYTES_CEILING}")
    total = sum(count for _, count in parts)
    offsets = np.zeros(total + 1, np.int32)
    valid = np.ones(total, np.uint8)
    begin = base = 0
    for column, count in parts:
        end = begin + count
        if column:
            np.add(
                np.frombuffer(column.offsets, np.int32)[1:], base, out=offsets[begin + 1 : end + 1]
            )
            if column.validity:
                valid[begin:end] = unpack_bits(column.validity, count)
            base += len(column.data)
        else:
            offsets[begin + 1 : end + 1] = base
            valid[begin:end] = 0
        begin = end
    data = memoryview(b"".join([column.data for column, _ in parts]))
    return Binary(offsets.data.cast("B"), data, pack_bits(valid))


def _join_partition_keys(parts: Sequence[Columns]) -> Binary:
    if not any(part.partition_keys for part in parts):
        return Binary()
    # In a part without this column the key is the partition key. Beside a part with it, that must be explicit.
    return _join_binary([(part.partition_keys or part.keys, part.count) for part in parts])


def _join_uids(parts: Sequence[Columns]) -> memoryview:
    if not any(part.uids for part in parts):
        return EMPTY
    return memoryview(b"".join([part.uids or bytes(UID_BYTES * part.count) for part in parts]))


def _join_tags(parts: Sequence[Columns]) -> tuple[memoryview, tuple[Mapping[str, str], ...]]:
    if not any(part.tag_index for part in parts):
        return EMPTY, ()
    numbers: dict[tuple[tuple[str, str], ...], int] = {}
    sets: list[Mapping[str, str]] = []
    columns: list[NDArray[np.int32]] = []
    for part in parts:
        renumbered: list[int] = []
        for tags in part.tag_sets if part.tag_index else (NO_TAGS,):
            number = numbers.setdefault(tuple(sorted(tags.items())), len(sets))
            if number == len(sets):
                sets.append(tags)
            renumbered.append(number)
        if len(renumbered) == 1:
            columns.append(np.full(part.count, renumbered[0], np.int32))
        else:
            index = np.frombuffer(part.tag_index, np.int32)
            columns.append(np.array(renumbered, np.int32)[index])
    # Unused sets are dropped, so that there are never more sets than rows.
    return _used_tags(np.concatenate(columns).data.cast("B"), tuple(sets))


# --- Envelopes ---


def select_envelope(envelope: Envelope, rows: Rows) -> Envelope:
    """The envelope of these rows. Its body fields are the old ones: the caller replaces them."""
    if envelope.run_count == 1 and envelope.is_stored:
        return _select_of_run(envelope, rows)
    starts = envelope.run_starts()
    first = np.searchsorted(starts, rows.begins, "right") - 1
    last = np.searchsorted(starts, rows.ends, "left") - 1
    pieces = last - first + 1  # the number of runs that each range touches
    runs = _spread(first, pieces)
    begins = np.maximum(np.repeat(rows.begins, pieces), starts[runs])
    ends = np.minimum(np.repeat(rows.ends, pieces), starts[runs + 1])
    skipped = begins - starts[runs]
    selected = {
        "topics": [envelope.topics[run] for run in runs.tolist()],
        "partitions": _pick32(envelope, envelope.partitions, runs),
        "counts": pack32((ends - begins).tolist()),
    }
    if envelope.is_stored:
        offsets = envelope.vector64(envelope.base_offsets)[runs] + skipped
        entry_rows = np.array(envelope.run_rows, np.int64)[runs] + skipped
        selected |= {
            "base_offsets": pack64(offsets.tolist()),
            "receive_times": _pick64(envelope, envelope.receive_times, runs),
            "epochs": _pick64(envelope, envelope.epochs, runs),
            "entries": _pick64(envelope, envelope.entries, runs),
            "rows": pack32(entry_rows.tolist()),
        }
    return _rewritten(envelope, selected)


def _select_of_run(envelope: Envelope, rows: Rows) -> Envelope:
    """The same for a stored batch of one run, in a third of the time (bench/queue.py, "work", key_shared)."""
    [base], [row] = envelope.column64(envelope.base_offsets), envelope.run_rows
    selected = {
        "topics": envelope.topics * len(rows.begins),
        "counts": _packed32(rows.ends - rows.begins),
        "base_offsets": (rows.begins + base).tobytes(),
        "rows": _packed32(rows.begins + row),
    }
    return _rewritten(envelope, selected)


def _packed32(values: Vector) -> bytes:
    """A column; one value where all are equal."""
    column = values.astype(np.int32)
    return (column[:1] if (column == column[0]).all() else column).tobytes()


def _pick32(envelope: Envelope, column: bytes, runs: Vector) -> bytes:
    return column if len(column) == 4 else pack32(envelope.vector32(column)[runs].tolist())


def _pick64(envelope: Envelope, column: bytes, runs: Vector) -> bytes:
    return column if len(column) == 8 else pack64(envelope.vector64(column)[runs].tolist())


def join_envelopes(parts: Sequence[Envelope]) -> Envelope:
    """An envelope of all runs of all parts, which must be of one shard, and all stored or all not."""
    first = parts[0]
    if any(part.shard != first.shard or part.is_stored != first.is_stored for part in parts):
        raise MalformedError("batches", "to be joined must be of one shard, all stored or none")

    def join32(column_of: Callable[[Envelope], bytes]) -> bytes:
        return pack32([*chain.from_iterable([part.column32(column_of(part)) for part in parts])])

    def join64(column_of: Callable[[Envelope], bytes]) -> bytes:
        return pack64([*chain.from_iterable([part.column64(column_of(part)) for part in parts])])

    joined = {
        "topics": [topic for part in parts for topic in part.topics],
        "partitions": join32(lambda part: part.partitions),
        "counts": join32(lambda part: part.counts),
    }
    if first.is_stored:
        joined |= {
            "base_offsets": join64(lambda part: part.base_offsets),
            "receive_times": join64(lambda part: part.receive_times),
            "epochs": join64(lambda part: part.epochs),
            "entries": join64(lambda part: part.entries),
            "rows": pack32([row for part in parts for row in part.run_rows]),
        }
    return _rewritten(first, joined)


def _rewritten(envelope: Envelope, runs: Mapping[str, object]) -> Envelope:
    return msgspec.structs.replace(
        envelope, producer=None, term=0, number=0, codec=Codec.NONE, **runs
    )
