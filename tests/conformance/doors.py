"""The doors that the suite knocks at. A door that joins later is one more line in `DOORS`.

Each opens a broker for the settings and the clock of a test, and gives a factory of clients: anything with the verbs
of `Bus`. What a door cannot do it lists, and tests that need it are not run there.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import runnel
from runnel.client.bus import Bus
from runnel.config import Settings
from runnel.embedded import MEMORY
from runnel.testing import VirtualClock

# Gives a client that is closed at the end of the `async with`.
Connect = Callable[[], AbstractAsyncContextManager[Bus]]


class Ability(enum.Enum):
    """What not every door can do."""

    RESTART = "what is kept on disk is there when the broker is opened again"
    STORED = "level stored is reached"


Open = Callable[[Settings, VirtualClock], AbstractAsyncContextManager[Connect]]


@dataclass(frozen=True)
class Door:
    name: str
    open: Open
    is_on_disk: bool
    cannot: frozenset[Ability] = frozenset()

    def can(self, needs: frozenset[Ability]) -> bool:
        return not needs & self.cannot

    def data(self, directory: str) -> str:
        """Where its broker keeps what is on disk, given a directory of the test's own."""
        return directory if self.is_on_disk else MEMORY


@asynccontextmanager
async def _in_process(settings: Settings, clock: VirtualClock) -> AsyncIterator[Connect]:
    async with runnel.Broker.open(settings, clock=clock) as broker:
        yield broker.connect


@asynccontextmanager
async def _over_tcp(settings: Settings, clock: VirtualClock) -> AsyncIterator[Connect]:
    async with runnel.Broker.open(settings, clock=clock) as broker, broker.listen() as url:
        yield lambda: runnel.connect(url)


_FORGETS = frozenset({Ability.RESTART, Ability.STORED})

DOORS = (
    Door("in process, in memory", _in_process, is_on_disk=False, cannot=_FORGETS),
    Door("in process, on disk", _in_process, is_on_disk=True),
    Door("tcp, on disk", _over_tcp, is_on_disk=True),
)
