"""What a history does: every operation is a function of the history, and `TABLE` draws one."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from runnel.errors import (
    BusyError,
    MovedError,
    OffsetAheadError,
    OffsetGoneError,
    ReadOnlyError,
    RunnelError,
    Unavailable,
    UnknownTopicError,
)
from runnel.log.log import Cursor, CursorPosition, Position, ShardId
from runnel.topics.names import TopicPartition
from tests.fakes.disk import Kind
from tests.log.samples import trim_log
from tests.log.simulation.checks import check_everything, take_in
from tests.log.simulation.facts import Fate, drops
from tests.log.simulation.plan import SECOND_NS
from tests.log.simulation.played_subscription import acknowledge
from tests.log.simulation.traffic import batch_of
from tests.simulation import troubles
from tests.simulation.history import Violation
from tests.simulation.operations import OperationTable
from tests.simulation.troubles import DiskFaults, Trouble, cancel_operation

if TYPE_CHECKING:
    from tests.log.simulation.history import History

Operation = Callable[["History"], Coroutine[Any, Any, None]]

_FAULTS: Final = DiskFaults(
    operations=(
        (Kind.WRITE, errno.EIO),
        (Kind.WRITE, errno.ENOSPC),
        (Kind.SYNC, errno.EIO),
        (Kind.SYNC, errno.EIO),
        (Kind.ALLOCATE, errno.ENOSPC),
        (Kind.CREATE, errno.EIO),
        (Kind.RENAME, errno.EIO),
        (Kind.REMOVE, errno.EIO),
        (Kind.TRUNCATE, errno.EIO),
        (Kind.SYNC_DIRECTORY, errno.EIO),
        (Kind.READ, errno.EIO),
    ),
    path_parts=("catalogue", "journals", ".segment", ""),
    times=(1, 1, 2, None),
)
_CURSORS: Final = ("c1", "c2")


# --- Publishing ---


async def append(history: History) -> None:
    for _ in range(history.random.choice((1, 1, 3))):
        sent, batch = history.traffic.new_batch()
        is_taken = history.traffic.give(sent, batch)
        if not is_taken and history.random.random() < 0.3:
            await _wait_for_room(history, sent.shard)


async def _wait_for_room(history: History, shard: ShardId) -> None:
    try:
        await history.patiently(history.log.wait_room(shard), "wait_room")
    except Unavailable as error:
        history.accept_failure(error)


async def append_named(history: History) -> None:
    traffic, random = history.traffic, history.random
    client = random.choice(traffic.clients)
    for _ in range(random.choice((1, 1, 3))):
        sent = client.repetition(random) if random.random() < 0.3 else None
        if sent is None:
            sent = client.next(random, lambda: traffic.draw_rows(client.topic, client.shard))
        if not traffic.give_named(client, sent):
            return


async def misuse_producer(history: History) -> None:
    """A gap, an older term, a term that does not begin with 0: all of them are refused at once."""
    client = history.random.choice(history.traffic.clients)
    if not client.is_known:
        return
    fault, term, number = client.misuse(history.random)
    history.say(f"{client.name} sends term {term} number {number}: {fault.__name__}")
    history.traffic.publishing_to(client.topic)
    batch = batch_of([((client.topic, 0), b"misused")], (client.name, term, number))
    try:
        history.log.append(batch)
    except fault:
        return
    except BusyError:
        return
    except Unavailable as error:
        history.accept_failure(error)
        return
    raise Violation(f"{client.name} sent term {term} number {number}, and it was taken")


async def let_time_pass(history: History) -> None:
    for _ in range(history.random.choice((1, 5, 40))):
        await asyncio.sleep(0)


async def move_clock(history: History) -> None:
    if history.random.random() < 0.2:
        seconds = -history.random.randint(1, 20)
        history.clock.step_wall(seconds * SECOND_NS)
    else:
        seconds = history.random.choice((1, 10, 45, 90))
        history.clock.advance(seconds * SECOND_NS)
    history.say(f"clock {seconds:+} s")


async def sync(history: History) -> None:
    traffic = history.traffic
    failed_before = traffic.failed_batches()
    waiting = [sent for sent in history.model.sent if sent.fate is Fate.RECEIVED]
    history.say("sync")
    await history.sync()
    traffic.look_at_answers()
    traffic.check_answered_after_sync()
    if traffic.failed_batches() == failed_before and not history.may_have_failed:
        for sent in waiting:
            history.model.stored_by_now(sent)


async def restart(history: History) -> None:
    await history.restart()


async def lose_shard(history: History) -> None:
    """A shard is lost without warning: what was queued is answered at once. The next process finds what was stored."""
    shards = [
        shard
        for shard in history.log.shards()
        if not history.log._owned.shards[shard].writer._dropped
    ]
    if history.medium is None or not shards:
        return
    shard = history.random.choice(shards)
    history.say(f"{shard} is lost")
    history.log._owned.shards[shard].writer.drop(MovedError(f"{shard} is elsewhere now"))
    history.traffic.look_at_answers()
    await history.restart()


# --- Hiding ---


async def purge(history: History) -> None:
    await _hide(history, "purge", history.log.metadata.purge_topic)


async def delete(history: History) -> None:
    await _hide(history, "delete", history.log.metadata.delete_topic)


async def _hide(history: History, what: str, act: Callable[[str], Awaitable[None]]) -> None:
    name = _some_topic(history)
    if name is None:
        return
    await history.finish_beside()
    history.traffic.look_at_answers()
    model = history.model
    topic = model.topic(name)
    floors: dict[TopicPartition, int] = {}

    async def look_and_act() -> None:  # in one go: what is visible now is what goes
        for number in range(topic.policy.partitions):
            floors[name, number] = visible_next(history, (name, number))
            model.purging((name, number), floors[name, number])
        history.say(f"{what} {name} below {list(floors.values())}")
        topic.deletion_is_open = what == "delete"
        await act(name)

    try:
        await history.patiently(look_and_act(), what)
    except UnknownTopicError:
        return  # its making could not be recorded
    except (OSError, RunnelError) as error:
        history.accept_failure(error)
        return
    for key, floor in floors.items():
        model.purged(key, floor)
    history.traffic.look_at_answers()
    if what == "delete":
        model.deleted(name)
    await check_everything(history)


def _some_topic(history: History) -> str | None:
    names = history.log.metadata.topics.names()
    return history.random.choice(names) if names else None


def visible_next(history: History, key: TopicPartition) -> int:
    partition = history.log._topics.recorded_partition(*key)
    return 1 if partition is None else partition.visible_next


# --- Cursors ---


async def set_cursor(history: History) -> None:
    name = _some_topic(history)
    if name is None:
        return
    await history.finish_beside()
    if history.plan.retains:
        if history.has_faults:
            return
        await sync(history)
        await check_everything(history)  # what is gone by now, this cursor cannot hold
    cursor = Cursor(history.random.choice(_CURSORS), (_some_place(history, name),), history.now_ns)
    history.say(f"set cursor {cursor.name}: {cursor.positions[0]}")
    history.model.setting_cursor(cursor.name, cursor)
    try:
        work = history.log.metadata.set_cursor(cursor.name, cursor.positions)
        await history.patiently(work, "set_cursor")
    except (OSError, RunnelError) as error:
        history.accept_failure(error)
    else:
        history.model.cursor_is(cursor.name, cursor)


def _some_place(history: History, topic: str) -> CursorPosition:
    random, model = history.random, history.model
    if random.random() < 0.7:
        partition = random.randrange(model.topic(topic).policy.partitions)
        known = model.partition((topic, partition))
        offset = random.randint(1, max(known.floor, known.next_min))
        return CursorPosition(topic=topic, partition=partition, offset=offset)
    shards = list(dict.fromkeys(map(model.shard_of, model.keys(topic))))
    shard = random.choice(shards) if len(shards) > 1 else shards[0]
    entries = history.log.shard(shard).entries()
    entry = random.randint(entries.first_offset, entries.next_offset)
    return CursorPosition(shard=shard, position=Position(1, entry), patterns=(topic,))


async def remove_cursor(history: History) -> None:
    name = history.random.choice(_CURSORS)
    await history.finish_beside()
    history.say(f"remove cursor {name}")
    history.model.setting_cursor(name, None)
    try:
        await history.patiently(history.log.metadata.remove_cursor(name), "remove_cursor")
    except (OSError, RunnelError) as error:
        history.accept_failure(error)
    else:
        history.model.cursor_is(name, None)


# --- Beside others: retention, rewriting, reading ---


async def trim(history: History) -> None:
    history.model.trimmed.update(shard.journal for shard in history.log.shards())
    history.say("trim …")
    try:
        trimmed = await history.patiently(trim_log(history.log), "trim")
    except (OSError, RunnelError) as error:
        history.accept_failure(error)
    else:
        history.say(f"   trimmed: {trimmed}")


async def rewrite(history: History) -> None:
    """Drop every third message or so from the sealed segments of a shard."""
    shards = history.log.shards()
    if not shards:
        return
    shard = history.random.choice(shards)
    salt = history.random.getrandbits(16)
    history.say(f"rewrite {shard} with salt {salt} …")
    history.model.dropping(shard, salt)

    def keep(
        key: TopicPartition, base: int, count: int, time_ns: int, entry: int
    ) -> list[tuple[int, int]]:
        offsets = range(base, base + count)
        return [(offset, offset + 1) for offset in offsets if not drops(salt, key, offset)]

    try:
        count = await history.patiently(history.log._owned.shards[shard].rewrite(keep), "rewrite")
        history.say(f"   rewrote {count} segments")
    except (OSError, RunnelError) as error:
        history.accept_failure(error)
    history.traffic.look_at_answers()
    keys = [key for key in history.model.partitions if history.model.shard_of(key) == shard]
    history.model.dropped(shard, salt, {key: visible_next(history, key) for key in keys})


async def read(history: History) -> None:
    name = _some_topic(history)
    if name is None:
        return
    random, model = history.random, history.model
    partition = random.randrange(model.topic(name).policy.partitions)
    offset = random.randint(1, model.partition((name, partition)).next_min + 1)
    bytes_max = random.choice((1, 500, 1 << 20))
    try:
        work = history.log.read(name, partition, offset, bytes_max=bytes_max)
        page = await history.patiently(work, "read")
    except (OffsetGoneError, OffsetAheadError, UnknownTopicError):
        return
    except (OSError, RunnelError) as error:
        history.accept_failure(error)
        return
    take_in(history, model.shard_of((name, partition)), page.found)


async def read_shard(history: History) -> None:
    shards = history.log.shards()
    if not shards:
        return
    random = history.random
    shard = random.choice(shards)
    bounds = history.log.shard(shard).entries()
    entry = random.randint(max(bounds.first_offset - 1, 1), bounds.next_offset)
    bytes_max = random.choice((1, 500, 1 << 20))
    try:
        work = history.log.read_shard(shard, Position(0, entry), bytes_max=bytes_max)
        page = await history.patiently(work, "read_shard")
    except OffsetGoneError:
        return
    except (OSError, RunnelError) as error:
        history.accept_failure(error)
        return
    if page.next_position.entry < entry:
        raise Violation(f"reading {shard} from entry {entry} led back to {page.next_position}")
    take_in(history, shard, page.found)


# --- Troubles ---


async def crash(history: History) -> None:
    troubles.lose_power(history, at_once=0.3)


async def kill(history: History) -> None:
    troubles.kill(history, at_once=0.3)


async def break_disk(history: History) -> None:
    if history.has_faults:
        await settle(history)
    else:
        arm_fault(history)


def arm_fault(history: History) -> None:
    troubles.break_disk(history, _FAULTS)


async def fill_disk(history: History) -> None:
    if history.disk.capacity_bytes is None:
        troubles.fill_disk(history)
    else:
        await settle(history)


async def settle(history: History) -> None:
    """The disk is well again: everything must work now, if need be after reopening."""
    await history.finish_beside()
    if not history.was_faulty:
        return
    log, model = history.log, history.model
    history.say("the disk is well again")
    history.heal_disk()
    await history.sync()
    history.traffic.look_at_answers()
    for shard in log.statistics().shards:
        if shard.is_read_only:
            history.say(f"reopen {shard.shard}")
            damage = await history.patiently(log.reopen(shard.shard), "reopen")
            if damage:
                raise Violation(f"reopening found damage: {damage}")
    probe = Cursor("probe", (), 0)
    model.setting_cursor(probe.name, probe)
    try:
        await history.patiently(log.metadata.set_cursor(probe.name, ()), "set_cursor")
        model.cursor_is(probe.name, probe)
    except ReadOnlyError as error:
        history.say(f"      {error}: restart")
        await history.close()
        await history.open()
    if not history.has_faults:
        await history.traffic.append_surely()
        await check_everything(history)


_BESIDE: Final[dict[Operation, float]] = {read: 8, read_shard: 6, trim: 5, rewrite: 3}
TABLE: Final[OperationTable[Operation]] = OperationTable(
    plain={
        append: 30,
        append_named: 14,
        misuse_producer: 3,
        let_time_pass: 14,
        move_clock: 6,
        sync: 4,
        restart: 2,
        purge: 2,
        delete: 2,
        set_cursor: 4,
        remove_cursor: 1,
        acknowledge: 6,
        check_everything: 3,
        **_BESIDE,
    },
    troubles={
        Trouble.POWER_LOSS: {crash: 5},
        Trouble.KILL: {kill: 4},
        Trouble.DISK_FAULT: {break_disk: 6},
        Trouble.DISK_FULL: {fill_disk: 4},
        Trouble.RECOVERY_CRASH: {crash: 2, kill: 1},
        Trouble.CANCELLATION: {cancel_operation: 5, trim: 5, rewrite: 3},
        Trouble.LOST_ANSWER: {lose_shard: 3},
    },
    beside=_BESIDE,
    beside_share=0.5,
)
