"""What may go wrong in a history: the table of troubles, and the ones that the process and its disk meet."""

from __future__ import annotations

import asyncio
import enum
import errno
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING

from tests.fakes.disk import Kind
from tests.fakes.power import PowerLoss

if TYPE_CHECKING:
    from tests.simulation.process import ProcessHistory


class Trouble(enum.Enum):
    """What may happen to a history beside its plain operations. A plan draws some of them."""

    POWER_LOSS = enum.auto()
    KILL = enum.auto()  # the process dies, the machine does not
    DISK_FAULT = enum.auto()  # disk operations fail
    DISK_FULL = enum.auto()
    RECOVERY_CRASH = enum.auto()  # power loss, again and again, while the log recovers
    LOST_CONSUMER = enum.auto()  # consumers vanish without leaving
    STALLED_CONSUMER = enum.auto()  # consumers keep their messages and do not renew
    NACK = enum.auto()
    BAD_ACK = enum.auto()  # acks of messages that the consumer does not hold, or acks sent twice
    OPERATOR = (
        enum.auto()
    )  # operators move, pause and delete subscriptions, and settle dead letters
    RETENTION = enum.auto()  # messages go before a consumer reads them
    DEAD_LETTER_FAULT = enum.auto()  # dead letters cannot be stored at first
    LAG = enum.auto()  # the broker reads slowly and looks at the clock late
    TOPIC_REMOVAL = enum.auto()  # operators purge and delete topics
    LOST_SHARD = enum.auto()  # shards go, as planned or without warning, and come back
    CANCELLATION = enum.auto()  # the caller of an operation is cancelled
    LOST_ANSWER = (
        enum.auto()
    )  # what makes groups durable loses answers; shards are lost without warning


def draw_troubles(
    random: Random,
    troubles: Iterable[Trouble],
    probability: float,
    others: Mapping[Trouble, float] = MappingProxyType({}),
) -> frozenset[Trouble]:
    """Some of these troubles: each with its probability in `others`, else with `probability`."""
    return frozenset(
        trouble for trouble in troubles if random.random() < others.get(trouble, probability)
    )


def names(troubles: Collection[Trouble]) -> str:
    """For transcripts."""
    return ", ".join(sorted(trouble.name.lower().replace("_", " ") for trouble in troubles))


# --- The process ends ---


def lose_power(history: ProcessHistory, *, at_once: float) -> None:
    """The machine loses power: now, with the probability `at_once`, or in one of the next disk operations."""
    if history.random.random() < at_once:
        history.say("power loss")
        history.disk.crash()
        raise PowerLoss("now")
    operation = _coming_disk_operation(history)
    history.say(f"power loss in disk operation {operation}")
    history.disk.crash_at(operation)


def kill(history: ProcessHistory, *, at_once: float) -> None:
    """The process is killed, now or in one of the next disk operations."""
    if history.random.random() < at_once:
        history.say("kill")
        history.disk.kill()
        raise PowerLoss("killed")
    operation = _coming_disk_operation(history)
    history.say(f"kill in disk operation {operation}")
    history.disk.kill_at(operation)


def _coming_disk_operation(history: ProcessHistory) -> int:
    return len(history.disk.operations) + history.random.randint(1, 30)


# --- The disk fails ---


@dataclass(frozen=True, slots=True)
class DiskFaults:
    """The faults that a simulator draws from: which operations fail, on paths with which part, how often."""

    operations: Sequence[tuple[Kind, int]]  # with the number of the error
    path_parts: Sequence[str]
    times: Sequence[int | None]  # None: until the disk heals


def break_disk(history: ProcessHistory, faults: DiskFaults) -> None:
    """Some disk operations fail from now on."""
    random = history.random
    kind, number = random.choice(faults.operations)
    part = random.choice(faults.path_parts)
    times = random.choice(faults.times)
    skip = random.randint(0, 3)
    name = errno.errorcode[number]
    history.say(f"fault: {kind.name} of …{part} fails with {name} ({times=}, {skip=})")
    history.disk.fail(kind, number, path=lambda path: part in path, skip=skip, times=times)
    history.has_faults = history.was_faulty = True


def fill_disk(history: ProcessHistory) -> None:
    """The disk is full from now on, but for a few bytes."""
    room = history.random.choice((0, 100, 1_000))
    history.say(f"disk full but for {room} bytes")
    history.disk.capacity_bytes = history.disk.used_bytes + room
    history.has_faults = history.was_faulty = True


# --- Callers leave ---


async def cancel_operation(history: ProcessHistory) -> None:
    """The caller of an operation is cancelled: the operation ends all the same, or leaves nothing behind."""
    if not history.beside:
        return
    name, work = history.beside.pop(0)
    history.say(f"   {name} is cancelled")
    work.cancel()
    await asyncio.wait([work])
    if not work.cancelled() and (error := work.exception()) is not None:
        raise error
