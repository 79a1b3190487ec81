"""Reading everything that a log has, by partition and by shard, and holding it against the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runnel.errors import ClientFault, OffsetAheadError, OffsetGoneError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.log import DamageGap, FoundBatch, OffsetBounds, Position, ShardId
from tests.log.samples import last_message
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.log.simulation.history import History


async def check_everything(history: History) -> None:
    """Nothing is checked while the disk is made to fail: reading may fail with it."""
    if history.has_faults:
        return
    await history.finish_beside()
    history.traffic.look_at_answers()
    read: dict[ShardId, set[bytes]] = {}
    for name in history.log.metadata.topics.names():
        for number, shard in enumerate(history.log.metadata.topics.get(name).shards):
            read.setdefault(shard, set()).update(await _check_partition(history, name, number))
    for shard in history.log.shards():
        swept = await _check_shard(history, shard)
        missed = read.get(shard, set()) - swept
        if missed:
            raise Violation(f"{shard}: read by partition, but not by shard: {sorted(missed)}")
    history.model.check_cursors(history.log.metadata.cursors.all())


def take_in(
    history: History, shard: ShardId, found: Sequence[FoundBatch]
) -> list[tuple[Message, int, int]]:
    """Every message that a reader was given, with its entry and row; the model looks at each."""
    rows = [row for one in found for row in _rows_of(one.wanted())]
    for message, entry, row in rows:
        history.model.saw(shard, message, entry, row)
    return rows


def _rows_of(batch: Batch) -> list[tuple[Message, int, int]]:
    places = [(run.entry, run.row + index) for run in batch.runs() for index in range(run.count)]
    return [
        (message, entry, row)
        for message, (entry, row) in zip(batch.messages(), places, strict=True)
    ]


async def _check_partition(history: History, name: str, number: int) -> set[bytes]:
    log, model, key = history.log, history.model, (name, number)
    next_min = model.partition(key).next_min
    bounds = await history.patiently(log.bounds(name, number), "bounds")
    if bounds.next_offset < next_min:
        raise Violation(f"{key} has come to {next_min} before, and now to {bounds.next_offset}")
    offsets: list[int] = []
    payloads: set[bytes] = set()
    gaps: list[DamageGap] = []
    bytes_max = history.random.choice((1, 800, 1 << 20))
    offset = bounds.first_offset
    while offset < bounds.next_offset:
        page = await history.patiently(log.read(name, number, offset, bytes_max=bytes_max), "read")
        if page.next_offset <= offset:
            raise Violation(f"reading {key} from {offset} leads to {page.next_offset}")
        gaps += page.gaps
        for message, _, _ in take_in(history, model.shard_of((name, number)), page.found):
            if (message.topic, message.partition) != key:
                raise Violation(f"reading {key} gave a message of {message.topic}")
            if offset <= message.offset < bounds.next_offset:
                model.check_not_expired(key, message.offset, history.now_ns)
                offsets.append(message.offset)
                payloads.add(message.payload)
        offset = page.next_offset
    _check_gaps(history, gaps)
    model.check_partition(key, bounds, offsets, history.now_ns, has_gaps=bool(gaps))
    if history.random.random() < 0.3:
        await _check_refusals(history, name, number, bounds)
        await _check_last(history, name, number)
    return payloads


def _check_gaps(history: History, gaps: Sequence[DamageGap]) -> None:
    if gaps and not history.is_damaged:
        raise Violation(f"reading met damage that nobody did: {gaps[0]}")


async def _check_refusals(history: History, name: str, number: int, bounds: OffsetBounds) -> None:
    """Reading before the first offset and behind the next is refused, with the right numbers."""
    log = history.log
    try:
        await history.patiently(log.read(name, number, bounds.first_offset - 1), "read")
    except OffsetGoneError as error:
        if bounds.first_offset == 1:
            raise Violation(f"{name}[{number}]: offset 0 is called gone: {error}") from error
        now = await history.patiently(log.bounds(name, number), "bounds")
        if not bounds.first_offset <= error.first_offset <= now.first_offset:
            raise Violation(f"{name}[{number}] has {bounds}, but: {error}") from error
    except ClientFault:
        if bounds.first_offset > 1:
            raise
    else:
        raise Violation(f"{name}[{number}] has {bounds}, but was read from before")
    try:
        page = await history.patiently(log.read(name, number, bounds.next_offset + 1), "read")
    except OffsetGoneError:
        return  # what was appended since then has expired
    except OffsetAheadError as error:
        if error.next_offset < bounds.next_offset:
            raise Violation(f"{name}[{number}] has {bounds}, but: {error}") from error
    else:
        if not page.found and page.next_offset <= bounds.next_offset:
            raise Violation(f"{name}[{number}] has {bounds}, but was read from behind")


async def _check_last(history: History, name: str, number: int) -> None:
    log, key = history.log, (name, number)
    before = await history.patiently(log.bounds(name, number), "bounds")
    last = await history.patiently(last_message(log, name, number), "last")
    after = await history.patiently(log.bounds(name, number), "bounds")
    if last is not None:
        [(message, entry, row)] = _rows_of(last)
        history.model.saw(history.model.shard_of((name, number)), message, entry, row, stays=False)
        if message.offset != after.next_offset - 1 and before == after:
            raise Violation(f"the last message of {key} is {message.offset}, but it has {after}")
    elif before == after and not history.is_damaged:
        history.model.check_last_may_be_gone(key, after.next_offset - 1)


async def _check_shard(history: History, shard: ShardId) -> set[bytes]:
    bounds = history.log.shard(shard).entries()
    position = Position(0, bounds.first_offset)
    payloads: set[bytes] = set()
    last_entry = last_time_ns = 0
    bytes_max = history.random.choice((1, 800, 1 << 20))
    while position.entry < bounds.next_offset:
        page = await history.patiently(
            history.log.read_shard(shard, position, bytes_max=bytes_max), "read_shard"
        )
        if page.next_position.entry <= position.entry:
            raise Violation(f"reading {shard} from {position} leads to {page.next_position}")
        _check_gaps(history, page.gaps)
        rows_of_entry: dict[int, list[int]] = {}
        for message, entry, row in take_in(history, shard, page.found):
            if entry < last_entry or message.receive_time_ns < last_time_ns:
                raise Violation(f"{shard}: entry {entry} goes back in number or time")
            last_entry, last_time_ns = entry, message.receive_time_ns
            rows_of_entry.setdefault(entry, []).append(row)
            payloads.add(message.payload)
        for entry, rows in rows_of_entry.items():
            history.model.check_entry(shard, entry, rows, history.now_ns)
        position = page.next_position
    return payloads
