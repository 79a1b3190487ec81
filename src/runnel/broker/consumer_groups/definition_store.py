"""The recorded definitions of subscriptions, and how they change when several nodes may change them at once.

A change is made from the definition as it is recorded now, and recorded only if that is still so. Otherwise another
node was faster, and the change is made again, from what that node has recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from zlib import crc32

from runnel.broker.consumer_groups.errands import ERRAND_PREFIX
from runnel.errors import Unavailable, UnknownSubscriptionError
from runnel.group_rules import definition as definitions
from runnel.group_rules.definition import Definition
from runnel.log.log import MetadataStore

# Each attempt fails only because another node succeeded meanwhile.
_ATTEMPTS_MAX: Final = 20
# The last digits of an id: those of two nodes differ even if they make subscriptions in the same microsecond.
_NODE_DIGITS: Final = 1_000


class DefinitionStore:
    """Reads and changes the recorded definitions."""

    def __init__(self, metadata: Callable[[], MetadataStore]) -> None:
        self._metadata = metadata
        self._last_id = 0

    @property
    def is_shared(self) -> bool:
        """Whether other nodes use the same definitions, and have shards that subscriptions cover."""
        return bool(self._metadata().member)

    def all(self) -> list[Definition]:
        return [
            definitions.decode(content)
            for name, content in self._metadata().subscriptions().items()
            if not name.startswith(ERRAND_PREFIX)
        ]

    def find(self, name: str) -> Definition | None:
        content = self._metadata().subscription(name)
        return None if content is None else definitions.decode(content)

    def note_id(self, number: int) -> None:
        """An id is used: later ones are higher."""
        self._last_id = max(self._last_id, number)

    def new_id(self, now_ns: int) -> int:
        """An id that no other subscription has or had: the time, with the node in its last digits."""
        number = max(now_ns, self._last_id + 1)
        if member := self._metadata().member:
            number -= number % _NODE_DIGITS
            number += crc32(member.encode()) % _NODE_DIGITS
            if number <= self._last_id:
                number += _NODE_DIGITS
        self._last_id = number
        return number

    async def add(self, definition: Definition) -> bool:
        """Record a new subscription. False: another node has made one of this name at the same time."""
        try:
            await self._metadata().set_subscription(
                definition.name, definitions.encode(definition), replaces=None
            )
        except Unavailable:
            if self._metadata().subscription(definition.name) is None:
                raise
            return False
        return True

    async def change(self, known: Definition, change: Callable[[Definition], Definition]) -> None:
        """Record a changed definition. UnknownSubscriptionError if the subscription was deleted meanwhile."""
        metadata, name = self._metadata(), known.name
        for attempt in range(_ATTEMPTS_MAX):
            content = metadata.subscription(name)
            present = None if content is None else definitions.decode(content)
            if content is None or present is None or present.id != known.id:
                raise UnknownSubscriptionError(f"subscription {name!r} was deleted")
            changed = change(present)
            if changed == present:
                return
            try:
                await metadata.set_subscription(name, definitions.encode(changed), replaces=content)
            except Unavailable:
                if metadata.subscription(name) == content or attempt == _ATTEMPTS_MAX - 1:
                    raise
            else:
                return

    async def remove(self, name: str) -> None:
        await self._metadata().remove_subscription(name)
