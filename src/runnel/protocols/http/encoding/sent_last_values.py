"""Remembers which last values each stream has been sent, so that an event's id needs only a list's token and a count.

The lists are in memory and share one limit. An id whose list is gone, after a restart or because newer lists took its
room, still says where the stream resumes. Then all last values are sent again, and none is missed.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

DIGEST_BYTES: Final = 8
REMEMBERED_MAX: Final = 1_000_000
"""Limit of the last values of all streams together: 8 MB."""
_TOKEN_BYTES: Final = 9


class SentLastValues:
    """The last values that one stream was sent, in order, as digests."""

    __slots__ = ("_digests", "_lists", "token")

    def __init__(self, token: str, lists: SentLists) -> None:
        self.token: Final = token
        self._lists = lists
        self._digests = bytearray()

    def __len__(self) -> int:
        return len(self._digests) // DIGEST_BYTES

    def add(self, digest: bytes) -> bool:
        """Remember one more. False: there is no room for it."""
        if not self._lists.make_room(self):
            return False
        self._digests += digest
        return True

    def first(self, count: int) -> frozenset[bytes]:
        digests = bytes(self._digests[: count * DIGEST_BYTES])
        return frozenset(
            digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)
        )


class SentLists:
    """The lists of all streams of a listener; the oldest make room for newer ones."""

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._remembered_max = remembered_max
        self._count = 0
        self._by_token: OrderedDict[str, SentLastValues] = OrderedDict()

    @property
    def count(self) -> int:
        """Last values that are remembered, of all streams."""
        return self._count

    def begin(self, sent: Iterable[bytes] = ()) -> SentLastValues:
        """A list for a new stream, whose client has got these last values before."""
        made = SentLastValues(secrets.token_urlsafe(_TOKEN_BYTES), self)
        for digest in sent:
            made.add(digest)
        return made

    def recall(self, token: str, count: int) -> frozenset[bytes]:
        """The first `count` digests of a list; none if the list is not remembered."""
        found = self._by_token.get(token)
        return frozenset() if found is None else found.first(count)

    def make_room(self, wanted: SentLastValues) -> bool:
        """Count one more value of this list, which is registered with its first one. False: there is no room."""
        if len(wanted) == 0:
            self._by_token[wanted.token] = wanted
        elif wanted.token not in self._by_token:
            return False  # newer lists took its room
        while self._count >= self._remembered_max:
            oldest = next(iter(self._by_token.values()))
            if oldest is wanted:
                return False
            del self._by_token[oldest.token]
            self._count -= len(oldest)
        self._count += 1
        return True
