"""Limits the size of the answer to one request for a list."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from runnel.errors import LimitExceededError

T = TypeVar("T")

Listed: TypeAlias = tuple[Sequence[T], bool]  # a part of a list, and whether nothing follows

PAGE_MAX: Final = 1000
"""The most items of one page: an answer is encoded at once, and a thousand items take about a millisecond."""

PARTS_MAX: Final = 10_000
"""Parts of one answer, such as places of cursors or members of subscriptions; the item that reaches it is the last."""


class ListRequest(msgspec.Struct, Generic[T], frozen=True):
    """Asks for a page of a list that is in order of names."""

    after: str = ""  # the last name of the page before
    limit: int = 0  # 0: everything, or LimitExceededError
    is_visible: Callable[[T], bool] | None = None  # lists only items that it returns True for
    owner: Hashable = None  # the walk takes this owner's turns of the loop


class PageBuilder(Generic[T]):
    """The items of one answer, in their order.

    With `limit` 0 the caller does not page, like clients from before there were pages: it gets everything, or an
    error. It would mistake a page for the whole list.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit = min(limit, PAGE_MAX)
        self._what = what
        self._parts = 0
        self.items: list[T] = []

    def is_full(self) -> bool:
        """Whether one more item has to wait for the next page."""
        if self._limit == 0:
            if self._parts >= PARTS_MAX:
                raise LimitExceededError(
                    f"there are too many {self._what} for one answer, which has at most {PARTS_MAX:,}: ask in pages, "
                    f"with a limit of 1 to {PAGE_MAX:,} and what the page before ended with as `after`"
                )
            return False
        return len(self.items) >= self._limit or self._parts >= PARTS_MAX

    def add(self, item: T, parts: int = 1) -> None:
        self.items.append(item)
        self._parts += max(1, parts)
