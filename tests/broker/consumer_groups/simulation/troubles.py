"""What may happen to the disk and the process of a broker."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from tests.broker.consumer_groups.simulation.plan import SECOND_NS
from tests.fakes.disk import Kind
from tests.simulation import troubles
from tests.simulation.troubles import DiskFaults

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.history import History

_FAULTS: Final = DiskFaults(
    operations=(
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
    ),
    path_parts=("state/", "state/", ".segment", "catalogue", ""),
    times=(1, 1, 3, None),
)


async def crash(history: History) -> None:
    troubles.lose_power(history, at_once=0.4)


async def kill(history: History) -> None:
    troubles.kill(history, at_once=0.4)


async def break_disk(history: History) -> None:
    if history.has_faults:
        await mend(history)
    else:
        troubles.break_disk(history, _FAULTS)


async def fill_disk(history: History) -> None:
    if history.has_faults:
        await mend(history)
    else:
        troubles.fill_disk(history)


async def mend(history: History) -> None:
    """The disk is well again, and the broker recovers as far as it can."""
    history.say("the disk is well again")
    history.heal_disk()
    history.clock.advance(2 * SECOND_NS)
    await history.take_turns(20)
