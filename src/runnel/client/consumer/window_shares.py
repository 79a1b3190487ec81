"""Divides a consumer's window among its parts: by what each node owes, so that no part starves. Pure.

The shares of all parts together never exceed the window. So a share that is taken away from one part is given to
another one only when the node has confirmed it: until then it may have leased more, up to the former share.

    want of all parts      share
    ─────────────────      ─────────────────────────────────────────────
    every one              the same for each
    some                   idle ones keep a small reserve, for the first message of the next burst
    more than the window   as many as fit have one message each, and take turns

A node that would exceed the bytes of its share may lease a single message, however large. So a small window of bytes is
not divided: then few parts have a share at a time, and the others take turns, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

# Idle parts keep this fraction of an equal share.
_RESERVE: Final = 4
# The least share of bytes that is worth having.
_SHARE_BYTES_MIN: Final = 64 * 2**10

PartT = TypeVar("PartT", bound=Hashable)


class _PartWindow(msgspec.Struct):
    messages: int = 0
    claimed: int = (
        0  # what the node may think its share is: the highest that is not confirmed to be over
    )
    used: int = 0  # messages leased now
    is_wanting: bool = False
    has_used: bool = False  # since its last turn
    is_confirmed: bool = True

    @property
    def held(self) -> int:
        """What other parts cannot have now."""
        return max(self.claimed, self.used)


class ShareChange(NamedTuple, Generic[PartT]):
    """A new share of a part. `needs_confirmation`: it is smaller; `confirmed` has to follow."""

    part: PartT
    messages: int
    size_bytes: int
    needs_confirmation: bool


class WindowShares(Generic[PartT]):
    """The shares of all parts. After each event, `changes` says what has to change."""

    def __init__(self, window_messages: int, window_bytes: int) -> None:
        self.resize(window_messages, window_bytes)
        self._shares: dict[PartT, _PartWindow] = {}  # in the order of their turns
        self.moving = 0  # messages that no part has: their shard moves from one node to another

    def resize(self, window_messages: int, window_bytes: int) -> None:
        """Set the whole window; it may be 0. `changes` says what follows from it, and `share` the bytes."""
        self._messages = window_messages
        self._bytes = window_bytes
        self._at_once_max = max(1, min(window_messages, window_bytes // _SHARE_BYTES_MIN))

    def add(self, part: PartT) -> None:
        self._shares[part] = _PartWindow()

    def remove(self, part: PartT) -> None:
        self._shares.pop(part, None)

    def share(self, part: PartT) -> tuple[int, int]:
        """The messages and bytes of a part's window."""
        messages = self._shares[part].messages
        whole = max(self._messages, messages, 1)  # a share may be about to become smaller
        return messages, max(self._bytes * messages // whole, min(messages, 1))

    @property
    def is_contended(self) -> bool:
        """Whether a part waits for a share that others have: then it matters what they use."""
        return any(
            share.is_wanting and share.messages < target
            for share, target in zip(self._shares.values(), self._targets(), strict=True)
        ) or (
            len(self._shares) > self._at_once_max
            and any(share.is_wanting and not share.messages for share in self._shares.values())
        )

    # --- Events ---

    def wants(self, part: PartT, *, is_wanting: bool) -> None:
        if part in self._shares:
            self._shares[part].is_wanting = is_wanting

    def uses(self, part: PartT, messages: int) -> None:
        """How many messages the part has leased now."""
        share = self._shares.get(part)
        if share is None:
            return
        if messages:
            share.has_used = True
        elif share.has_used:  # it has had its turn
            share.has_used = False
            if len(self._shares) > self._at_once_max:
                self._shares[part] = self._shares.pop(part)
        share.used = messages

    def passed_on(self, part: PartT, messages: int) -> None:
        """Messages of the part move with their shard. Its node takes what they used from its share by itself."""
        share = self._shares.get(part)
        if share is not None:
            share.messages = max(0, share.messages - messages)
            share.claimed = max(0, share.claimed - messages)

    def confirmed(self, part: PartT) -> None:
        """The node has confirmed the last smaller share: it has leased no more than it has said."""
        share = self._shares.get(part)
        if share is not None:
            share.is_confirmed = True
            share.claimed = share.messages

    def reset(self, part: PartT) -> None:
        """The part's connection is lost: it has nothing, and its node remembers nothing."""
        share = self._shares.get(part)
        if share is not None:
            self._shares[part] = _PartWindow()

    # --- Decisions ---

    def changes(self) -> list[ShareChange[PartT]]:
        """The shares that change now: first the smaller ones, then what is free for the others."""
        changes: list[ShareChange[PartT]] = []
        targets = dict(zip(self._shares, self._targets(), strict=True))
        for part, share in self._shares.items():
            if targets[part] < share.messages and share.is_confirmed:
                share.messages = targets[part]
                share.is_confirmed = False
                changes.append(self._change(part, needs_confirmation=True))
        free = self._messages - self.moving - sum(share.held for share in self._shares.values())
        at_once = sum(1 for share in self._shares.values() if share.held)
        for part, share in self._shares.items():
            more = min(targets[part] - share.messages, free)
            if more <= 0 or not share.is_confirmed:
                continue
            if not share.held:
                if at_once == self._at_once_max:
                    continue
                at_once += 1
            before = share.held
            share.messages += more
            share.claimed = share.messages
            free -= share.held - before
            changes.append(self._change(part, needs_confirmation=False))
        return changes

    def _change(self, part: PartT, *, needs_confirmation: bool) -> ShareChange[PartT]:
        return ShareChange(part, *self.share(part), needs_confirmation)

    def _targets(self) -> list[int]:
        """The share that each part should have, in the order of their turns."""
        shares = list(self._shares.values())
        if not shares:
            return []
        wanting = [share.is_wanting for share in shares]
        if not any(wanting):
            wanting = [True] * len(shares)
        if len(shares) > self._at_once_max:
            return self._turns(wanting)
        reserve = self._messages // len(shares) // _RESERVE
        left = self._messages - reserve * wanting.count(False)
        each, rest = divmod(left, wanting.count(True))
        targets = []
        for is_wanting in wanting:
            if is_wanting:
                targets.append(each + (rest > 0))
                rest -= 1
            else:
                targets.append(reserve)
        return targets

    def _turns(self, wanting: list[bool]) -> list[int]:
        """The first that want something, as many as may have a share at the same time."""
        count = min(wanting.count(True), self._at_once_max)
        each, rest = divmod(self._messages, count)
        targets = []
        for is_wanting in wanting:
            has_turn = is_wanting and count > 0
            targets.append(each + (rest > 0) if has_turn else 0)
            if has_turn:
                count -= 1
                rest -= 1
        return targets
