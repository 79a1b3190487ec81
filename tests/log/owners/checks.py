"""Reading everything that a shard has at its owner, and holding it against the model."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from runnel.errors import UnknownTopicError
from runnel.log.log import Position, ShardId
from runnel.log.metadata.records import TopicDeleted, TopicMade
from runnel.topics.names import TopicPartition
from tests.log.owners.member import Member
from tests.log.owners.plan import KEYS
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.log.owners.history import History


async def check(history: History, owner: Member, shard: ShardId) -> None:
    """Read everything that a shard has."""
    history.traffic.look_at_answers()
    _look_at_metadata(history)
    history.say(f"{owner} reads all of {shard}")
    for key in KEYS:
        if history.shard_of(key) == shard and owner.log.metadata.topics.find(key[0]) is not None:
            with suppress(UnknownTopicError):
                await _check_partition(history, owner, key)
    await history.at(owner, read_entries(history, owner, shard), "read_shard")


def _look_at_metadata(history: History) -> None:
    """Every log knows the same topics."""
    topics: dict[str, int] = {}
    for record in history.shared.records:
        if isinstance(record, TopicMade):
            topics[record.name] = history.model.generations[record.name] = record.generation
        elif isinstance(record, TopicDeleted) and record.name in topics:
            history.model.generations[record.name] = topics.pop(record.name) + 1
    for member in history.members:
        missing = topics.keys() - set(member.log.metadata.topics.names())
        if missing and not member.is_dead:
            raise Violation(f"{member} does not know the topics {sorted(missing)}")


async def _check_partition(history: History, owner: Member, key: TopicPartition) -> None:
    log, shard = owner.log, history.shard_of(key)
    keeps_all = history.policies.for_topic(key[0]).retain.bytes_max is None
    required = history.model.required(key)
    bounds = await history.at(owner, log.bounds(*key), "bounds")
    offsets: list[int] = []
    offset = bounds.first_offset
    while offset < bounds.next_offset:
        removed = history.model.removed()
        page = await history.at(owner, log.read(*key, offset, bytes_max=900), "read")
        if page.gaps:
            raise Violation(f"{key} has damage that nobody did: {page.gaps}")
        for found in page.found:
            read = found.wanted()
            for message, run in zip(read.messages(), _run_of_rows(read), strict=True):
                history.model.saw(shard, log.shard(shard).epoch, removed, message, *run)
                if offset <= message.offset < bounds.next_offset:
                    offsets.append(message.offset)
        offset = page.next_offset
    history.model.check_partition(key, required, bounds, offsets, keeps_all=keeps_all)
    if not keeps_all and (newest := history.model.newest(key)) is not None:
        await _check_last(history, owner, key, bounds.next_offset - 1, newest)


async def _check_last(
    history: History, owner: Member, key: TopicPartition, offset: int, newest: bytes
) -> None:
    async def find() -> list[bytes]:
        return [
            each.batch.messages()[row].payload
            async for some in owner.log.messages_at(history.shard_of(key), {key: offset})
            for each in some
            for row in each.rows
        ]

    found = await history.at(owner, find(), "messages_at")
    if not found:
        raise Violation(f"{key} has lost its last value, {newest!r}")


async def read_entries(history: History, owner: Member, shard: ShardId) -> None:
    """Read a shard from its first entry to its end."""
    log = owner.log
    view = log.shard(shard)
    bounds = view.entries()
    position = Position(history.random.choice((0, view.epoch, 1)), bounds.first_offset)
    last = (0, 0)
    while position.entry < bounds.next_offset:
        removed = history.model.removed()
        page = await log.read_shard(shard, position, bytes_max=900)
        for found in page.found:
            head = found.batch.envelope
            place = (head.entry, head.column64(head.epochs)[0])
            if place[0] <= last[0] or place[1] < last[1]:
                raise Violation(f"{shard}: entry and epoch {place} come after {last}")
            last = place
            read = found.wanted()
            for message, run in zip(read.messages(), _run_of_rows(read), strict=True):
                history.model.saw(shard, view.epoch, removed, message, *run)
        if page.next_position.entry <= position.entry:
            raise Violation(f"{shard}: reading from {position} leads to {page.next_position}")
        position = page.next_position


def _run_of_rows(read: Any) -> list[tuple[int, int]]:
    """The entry and the epoch of each message."""
    return [(run.entry, run.epoch) for run in read.runs() for _ in range(run.count)]
