"""What may befall the disk and the process."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from tests.broker.consumer_groups.simulation.plan import SECOND_NS
from tests.fakes.disk import Kind
from tests.fakes.power import PowerLoss

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.history import History

_FAULTS: Final = (
    (Kind.WRITE, errno.EIO),
    (Kind.WRITE, errno.EIO),
    (Kind.WRITE, errno.ENOSPC),
    (Kind.SYNC, errno.EIO),
    (Kind.ALLOCATE, errno.ENOSPC),
    (Kind.CREATE, errno.EIO),
    (Kind.RENAME, errno.EIO),
    (Kind.REMOVE, errno.EIO),
    (Kind.TRUNCATE, errno.EIO),
    (Kind.SYNC_DIRECTORY, errno.EIO),
    (Kind.READ, errno.EIO),
    (Kind.OPEN, errno.EIO),
)


async def crash(history: History) -> None:
    if history.random.random() < 0.4:
        history.say("power loss")
        history.disk.crash()
        raise PowerLoss("now")
    operation = len(history.disk.operations) + history.random.randint(1, 30)
    history.say(f"power loss in disk operation {operation}")
    history.disk.crash_at(operation)


async def kill(history: History) -> None:
    if history.random.random() < 0.4:
        history.say("kill")
        history.disk.kill()
        raise PowerLoss("killed")
    operation = len(history.disk.operations) + history.random.randint(1, 30)
    history.say(f"kill in disk operation {operation}")
    history.disk.kill_at(operation)


async def break_disk(history: History) -> None:
    if history.has_faults:
        await mend(history)
        return
    random = history.random
    kind, number = random.choice(_FAULTS)
    part = random.choice(("state/", "state/", ".segment", "catalogue", ""))
    times = random.choice((1, 1, 3, None))
    history.say(f"fault: {kind.name} of …{part} fails with {errno.errorcode[number]} ({times=})")
    history.disk.fail(
        kind, number, path=lambda path: part in path, skip=random.randint(0, 3), times=times
    )
    history.has_faults = history.was_faulty = True


async def fill_disk(history: History) -> None:
    if history.has_faults:
        await mend(history)
        return
    room = history.random.choice((0, 100, 1_000))
    history.say(f"disk full but for {room} bytes")
    history.disk.capacity_bytes = history.disk.used_bytes + room
    history.has_faults = history.was_faulty = True


async def mend(history: History) -> None:
    """The disk is well again, and the broker goes on as well as it can."""
    history.say("the disk is well again")
    history.heal()
    history.clock.advance(2 * SECOND_NS)
    await history.take_turns(20)
