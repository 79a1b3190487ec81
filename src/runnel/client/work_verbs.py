"""The bus's verbs for acknowledged work: consumers, subscriptions and dead letters."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final, Literal, TypeAlias

import msgspec

from runnel.client.arguments import (
    check_member,
    check_natural,
    check_patterns,
    check_subscription,
    milliseconds,
)
from runnel.client.connection import Deadline, Router, Timers, warn_of_habits
from runnel.client.consumer import Consumer, LateWork, StartAt, start_of
from runnel.client.requests import PER_PAGE, BusRequests
from runnel.errors import ClientFault, UnknownSubscriptionError
from runnel.formats import wire, work_heads
from runnel.formats.batch import unpack_blocks
from runnel.formats.message import Message
from runnel.formats.work_heads import SubscriptionState, WorkOptions
from runnel.topics.names import dead_letter_topic

Offsets: TypeAlias = Iterable[int] | Literal["all"]

MODES: Final = ("shared", "key_shared", "multicast")
_DEAD_LETTERS_PER_PAGE: Final = 100


class DeadLetterPage(msgspec.Struct, frozen=True):
    """Dead letters as they are stored in `!dead/…`. The next page begins at `next_offset`; 0: this is the last."""

    messages: list[Message]
    next_offset: int


class WorkVerbs(BusRequests):
    """The part of `Bus` that is about acknowledged work."""

    def __init__(self, router: Router, timers: Timers, *, deadline_s: float | None) -> None:
        super().__init__(router, timers, deadline_s=deadline_s)
        self._consumers: dict[Consumer, None] = {}
        self._consumer_numbers = itertools.count(1)

    # --- Consuming ---

    def consume(
        self,
        subscription: str,
        *patterns: str,
        mode: str | None = None,
        member: str | None = None,
        start: StartAt | None = None,
        window_messages: int = 256,
        window_bytes: int = 8 * 2**20,
        lease_s: float | None = None,
        processing_max_s: float | None = None,
        deliveries_max: int | None = None,
        retry_delay_s: float | None = None,
        retry_delay_max_s: float | None = None,
        backoff: float | None = None,
        absent_max_s: float | None = None,
        on_late: Callable[[LateWork], object] | None = None,
    ) -> Consumer:
        """Consume from a subscription: `async with bus.consume("billing", "orders/*") as consumer`.

        With patterns, the subscription is made if it does not exist, with these options. `mode` is "shared" by default.
        `start` is by default the earliest message, and for a member of a multicast the next one. Without patterns, the
        subscription must exist. At most the window is leased to the consumer at once. `member` is the consumer's name
        in a multicast. `on_late` is called with acks that came too late.
        """
        self._deadline()  # refuses when closed
        _check_patterns(subscription, patterns)
        for name, value in (("window_messages", window_messages), ("window_bytes", window_bytes)):
            check_natural(name, value)
            if not value:
                raise ClientFault(f"{name} is {value!r}: nothing could be delivered")
        if member is not None and member != "":
            check_member(member)
        if mode is None and patterns:
            mode = MODES[0]
        number = next(self._consumer_numbers)
        request = work_heads.Consume(
            0,
            number,
            subscription,
            patterns,
            "" if mode is None else _checked_mode(mode),
            window_messages,
            window_bytes,
            member or "",
            None if start is None else start_of(start, patterns),
            _options(
                lease_s,
                processing_max_s,
                deliveries_max,
                retry_delay_s,
                retry_delay_max_s,
                backoff,
                absent_max_s,
            ),
        )
        consumers = self._consumers
        consumer = Consumer(
            self._router,
            self._timers,
            request,
            on_late=on_late,
            deadline_s=self._deadline_s,
            on_close=lambda closed: consumers.pop(closed, None),
        )
        consumers[consumer] = None
        return consumer

    # --- Subscriptions ---

    async def subscriptions(self) -> list[SubscriptionState]:
        """All subscriptions, with the backlog of their members."""
        found: list[SubscriptionState] = []
        while True:
            after = found[-1].name if found else ""
            answer, _ = await self._ask(
                work_heads.SubscriptionListHead,
                lambda number, after=after: work_heads.ListSubscriptions(  # type: ignore[misc]
                    number, None, after, PER_PAGE
                ),
                "listing subscriptions",
            )
            found += answer.subscriptions
            if answer.is_complete or not answer.subscriptions:
                return found

    async def subscription(self, name: str) -> SubscriptionState:
        """One subscription, with its position in each partition."""
        check_subscription(name)
        answer, _ = await self._ask(
            work_heads.SubscriptionListHead,
            lambda number: work_heads.ListSubscriptions(number, name),
            f"describing subscription {name!r}",
        )
        if not answer.subscriptions:
            raise UnknownSubscriptionError(f"there is no subscription {name!r}")
        return answer.subscriptions[0]

    async def make_subscription(
        self,
        name: str,
        *patterns: str,
        mode: str = "shared",
        start: StartAt | None = None,
        lease_s: float | None = None,
        processing_max_s: float | None = None,
        deliveries_max: int | None = None,
        retry_delay_s: float | None = None,
        retry_delay_max_s: float | None = None,
        backoff: float | None = None,
        absent_max_s: float | None = None,
    ) -> None:
        """Make a subscription before its first consumer. If the same subscription exists, this does nothing."""
        _check_patterns(name, patterns)
        if not patterns:
            raise ClientFault(f"subscription {name!r} needs at least one pattern of topics")
        mode = _checked_mode(mode)
        begin = None if start is None else start_of(start, patterns)
        options = _options(
            lease_s,
            processing_max_s,
            deliveries_max,
            retry_delay_s,
            retry_delay_max_s,
            backoff,
            absent_max_s,
        )
        await self._ask(
            wire.Done,
            lambda number: work_heads.MakeSubscription(
                number, name, patterns, mode, begin, options
            ),
            f"making subscription {name!r}",
        )
        await warn_of_habits(self._router, patterns, Deadline(self._timers, self._deadline_s))

    async def delete_subscription(self, name: str) -> None:
        """Delete a subscription and its backlog. Its consumers end, its dead letters stay."""
        check_subscription(name)
        await self._do(
            lambda number: work_heads.DeleteSubscription(number, name),
            f"deleting subscription {name!r}",
        )

    async def pause_subscription(self, name: str) -> None:
        """Pause delivery. Messages that are leased may still be finished."""
        await self._pause(name, is_paused=True)

    async def resume_subscription(self, name: str) -> None:
        """Resume delivery after a pause."""
        await self._pause(name, is_paused=False)

    async def _pause(self, name: str, *, is_paused: bool) -> None:
        check_subscription(name)
        await self._ask(
            wire.Done,
            lambda number: work_heads.PauseSubscription(number, name, is_paused),
            f"{'pausing' if is_paused else 'resuming'} subscription {name!r}",
        )

    async def move_subscription(
        self, name: str, start: StartAt, *, member: str | None = None
    ) -> None:
        """Move a subscription: messages before `start` count as acknowledged, all from there on are delivered (again).

        `start`: "earliest", "latest", a time, or a map of topics or (topic, partition) to offsets, which moves only
        these. `member`: move only this member of a multicast.
        """
        check_subscription(name)
        if member is not None:
            check_member(member)
        if type(start) is int:
            raise ClientFault(
                f"start={start} is an offset: give a map of topics, or (topic, partition), to offsets"
            )
        begin = start_of(start, ())
        await self._do(
            lambda number: work_heads.MoveSubscription(number, name, begin, member),
            f"moving subscription {name!r}",
        )

    async def remove_member(self, name: str, member: str) -> None:
        """Remove a member of a multicast, with its backlog."""
        check_subscription(name)
        check_member(member)
        await self._do(
            lambda number: work_heads.RemoveMember(number, name, member),
            f"removing member {member!r} of subscription {name!r}",
        )

    # --- Dead letters ---

    async def dead_letters(self, name: str, *, offset: int = 0) -> AsyncIterator[Message]:
        """Messages of a subscription that failed too often, oldest first. Their tags say why, and their origin.

        Their offsets are those in the topic `!dead/…`, which `redrive` and `drop_dead` take.
        """
        while True:
            page = await self.dead_letter_page(name, offset)
            for message in page.messages:
                yield message
            offset = page.next_offset
            if not offset:
                return

    async def dead_letter_page(
        self, name: str, offset: int = 0, *, messages_max: int = _DEAD_LETTERS_PER_PAGE
    ) -> DeadLetterPage:
        """One page of a subscription's dead letters, from an offset on."""
        check_subscription(name)
        check_natural("offset", offset)
        check_natural("messages_max", messages_max)
        answer, tail = await self._ask(
            work_heads.DeadList,
            lambda number: work_heads.DeadLettersHead(number, name, offset, messages_max),
            f"listing dead letters of {name!r}",
            topic=dead_letter_topic(name),
        )
        messages = [message for batch in unpack_blocks(tail) for message in batch.messages()]
        return DeadLetterPage(messages, answer.next_offset)

    async def redrive(self, name: str, offsets: Offsets) -> int:
        """Return dead letters, these or "all", to their subscription as if they had never failed; returns how many."""
        return await self._settle_dead(name, offsets, is_redriven=True)

    async def drop_dead(self, name: str, offsets: Offsets) -> int:
        """Drop dead letters, these or "all"; returns how many."""
        return await self._settle_dead(name, offsets, is_redriven=False)

    async def _settle_dead(self, name: str, offsets: Offsets, *, is_redriven: bool) -> int:
        check_subscription(name)
        chosen = _checked_offsets(offsets)
        is_all = chosen is None
        answer, _ = await self._ask(
            work_heads.SettledHead,
            lambda number: work_heads.SettleDead(number, name, is_redriven, chosen or (), is_all),
            f"{'sending back' if is_redriven else 'dropping'} dead letters of {name!r}",
            is_repeatable=False,
            topic=dead_letter_topic(name),
        )
        return answer.messages


def _check_patterns(name: str, patterns: tuple[str, ...]) -> None:
    check_subscription(name)
    check_patterns(patterns)


def _checked_mode(mode: str) -> str:
    if mode not in MODES:
        raise ClientFault(f"mode {mode!r} is unknown: {', '.join(MODES)}")
    return mode


def _checked_offsets(offsets: Offsets) -> tuple[int, ...] | None:
    """The offsets; None: all."""
    if isinstance(offsets, str):
        if offsets != "all":
            raise ClientFault(f"{offsets!r} are no offsets: give numbers, or 'all'")
        return None
    if not isinstance(offsets, Iterable):
        raise ClientFault(f"{offsets!r} are no offsets: give several of them, as [3, 4], or 'all'")
    chosen = tuple(offsets)
    for offset in chosen:
        check_natural("an offset", offset)
    return chosen


def _options(
    lease_s: float | None,
    processing_max_s: float | None,
    deliveries_max: int | None,
    retry_delay_s: float | None,
    retry_delay_max_s: float | None,
    backoff: float | None,
    absent_max_s: float | None,
) -> WorkOptions | None:
    """The options for the wire; None: all are the broker's defaults."""
    check_natural("deliveries_max", deliveries_max)
    if backoff is not None and not (isinstance(backoff, int | float) and 1 <= backoff < 1e6):
        raise ClientFault(f"backoff is {backoff!r}: it must be a factor from 1 on")
    options = WorkOptions(
        milliseconds("lease_s", lease_s),
        milliseconds("processing_max_s", processing_max_s),
        deliveries_max,
        milliseconds("retry_delay_s", retry_delay_s),
        milliseconds("retry_delay_max_s", retry_delay_max_s),
        None if backoff is None else float(backoff),
        milliseconds("absent_max_s", absent_max_s),
    )
    return None if options == WorkOptions() else options
