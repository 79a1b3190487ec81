"""Divides the buffer of a live subscription among its parts. Pure.

Each part may owe an equal share: credit that it has not used, and messages that the program has not read. When parts
are added, the others give back unused credit. So all parts together never owe more than the buffer, beyond what was
under way when their number changed, and none waits for messages of another.
"""

from __future__ import annotations

import msgspec


class _Share(msgspec.Struct):
    unused: int = 0  # credit that was granted and not used; below 0: the last delivery was larger
    held: int = 0  # delivered, and not read

    @property
    def owed(self) -> int:
        return self.unused + self.held


class CreditShares:
    """The credit of each part, by its number."""

    def __init__(self, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._shares: dict[int, _Share] = {}
        self._orphaned: dict[int, int] = {}  # held messages of parts that have ended

    @property
    def held_bytes(self) -> int:
        """All messages that have arrived and were not read."""
        held = sum(share.held for share in self._shares.values())
        return held + sum(self._orphaned.values())

    @property
    def _share_bytes(self) -> int:
        return max(1, self._buffer_bytes // max(1, len(self._shares)))

    @property
    def _free_bytes(self) -> int:
        owed = sum(max(share.held, share.owed) for share in self._shares.values())
        return self._buffer_bytes - owed - sum(self._orphaned.values())

    def open(self, part: int) -> tuple[int, dict[int, int]]:
        """A part begins. Returns its first credit, and by how much that of others falls."""
        self._shares[part] = _Share()
        less: dict[int, int] = {}
        for number, share in self._shares.items():
            too_much = min(share.owed - self._share_bytes, share.unused)
            if too_much > 0:
                share.unused -= too_much
                less[number] = too_much
        first = max(0, min(self._share_bytes, self._free_bytes))
        self._shares[part].unused = first
        return first, less

    def close(self, part: int) -> None:
        """A part has ended. Its messages that were not read still take room."""
        share = self._shares.pop(part, None)
        if share is not None and share.held:
            self._orphaned[part] = share.held

    def delivered(self, part: int, size: int) -> None:
        """A delivery has come, whether or not it counts."""
        share = self._shares.get(part)
        if share is not None:
            share.unused -= size
            share.held += size

    def consumed(self, part: int, size: int) -> None:
        """The program has read this much of a part, or it was dropped."""
        share = self._shares.get(part)
        if share is not None:
            share.held -= size
        elif part in self._orphaned:
            self._orphaned[part] -= size
            if self._orphaned[part] <= 0:
                del self._orphaned[part]

    def due(self) -> dict[int, int]:
        """The credit to grant now: in steps of a quarter of a share, to avoid a frame for each batch."""
        granted: dict[int, int] = {}
        share_bytes, free_bytes = self._share_bytes, self._free_bytes
        for number, share in self._shares.items():
            debt = max(
                0, -share.unused
            )  # delivered beyond the credit: paying it back takes no room
            room = min(share_bytes - share.owed, free_bytes + debt)
            if room > 0 and (4 * room >= share_bytes or share.unused <= 0):
                share.unused += room
                free_bytes -= max(0, room - debt)
                granted[number] = room
        return granted
