"""All seats of a door: found by who asks, made when somebody asks first, ended when nobody has for a while."""

from __future__ import annotations

import asyncio
import secrets
from typing import Final, NamedTuple
from urllib.parse import quote

from runnel.errors import LimitExceededError, RunnelError, UnknownSubscriptionError
from runnel.formats.work_heads import Consume
from runnel.group_rules.definition import Mode
from runnel.protocols.http.consumers.polling_consumer import PollingConsumer
from runnel.protocols.http.server.calls import Call
from runnel.protocols.http.server.connections import HttpDoor
from runnel.security.rights import Right, Rights

_IDLE_NS_MAX: Final = 60 * 1_000_000_000
_SWEEP_SECONDS: Final = 1.0
_ID_BYTES: Final = 9
# One token may have a part of all seats: others are to have some too.
_TOKENS_SHARE: Final = 4


class Taken(NamedTuple):
    """A seat, and whose it is. `consumer` is a name that the caller chose, or was given."""

    seat: PollingConsumer
    subscription: str
    member: str
    consumer: str
    owner: Rights | None  # of the token, for as long as it has these; None: nobody is asked for one


class Seats:
    """By the name of the subscription, the member, the consumer, and the token; and by the ids in ack ids."""

    def __init__(self, door: HttpDoor) -> None:
        self._door = door
        self._by_key: dict[tuple[str, str, str, Rights | None], Taken] = {}
        self._by_id: dict[str, Taken] = {}
        # In shared mode nobody minds who sits where: those without a name of their own have one seat together.
        self._shared: dict[tuple[str, Rights | None], Taken] = {}
        self._joining = asyncio.Lock()
        self._sweeping: asyncio.Task[None] | None = None
        door.broker.metrics.add_limit(
            "http.consumers_max", door.settings.http.consumers_max, lambda: len(self._by_id)
        )
        door.on_close.append(self._close)
        door.gate.on_token_ended.append(self._on_token_ended)

    def __len__(self) -> int:
        return len(self._by_id)

    def by_id(self, seat_id: str) -> Taken | None:
        return self._by_id.get(seat_id)

    async def find(self, call: Call, subscription: str, member: str, consumer: str) -> Taken:
        """The caller's seat; made if it has none. Without the name of a consumer it gets one."""
        taken = self._known(call, subscription, member, consumer)
        if taken is None:
            async with self._joining:
                taken = self._known(call, subscription, member, consumer)
                if taken is None:
                    taken = await self._join(call, subscription, member, consumer)
        check_rights(call, taken)
        return taken

    def _known(self, call: Call, subscription: str, member: str, consumer: str) -> Taken | None:
        if not consumer:
            return None if member else self._shared.get((subscription, call.rights))
        return self._by_key.get((subscription, member, consumer, call.rights))

    def of(self, call: Call, subscription: str, consumer: str) -> list[Taken]:
        """The caller's seats of this name, of whichever member."""
        return [
            taken
            for taken in self._by_id.values()
            if taken.owner is call.rights
            and (taken.subscription, taken.consumer) == (subscription, consumer)
        ]

    async def _join(self, call: Call, subscription: str, member: str, consumer: str) -> Taken:
        self._make_room(call.rights)
        seat_id = secrets.token_urlsafe(_ID_BYTES)
        name = consumer or f"http-{seat_id}"
        seat = PollingConsumer(
            seat_id,
            next(self._door.broker.connection_ids),
            f"{call.peer} {name}",
            self._door.broker.clock,
            lambda: self._forget(taken),
        )
        taken = Taken(seat, subscription, member, name, call.rights)
        request = Consume(0, 1, subscription, window_messages=0, window_bytes=0, member=member)
        try:
            seat.open(await call.access.consume(1, seat, request))
        except UnknownSubscriptionError:
            # The broker would make it for who names its topics; here that is another request.
            raise UnknownSubscriptionError(
                f"subscription {subscription!r} does not exist; "
                f"PUT /v1/subscriptions/{quote(subscription, safe='')} makes it"
            ) from None
        try:
            call.check_admitted()  # it would not be told that its token has ended meanwhile
        except RunnelError:
            seat.close()
            raise
        self._by_key[subscription, member, name, call.rights] = taken
        self._by_id[seat_id] = taken
        if not consumer and seat.consumer.definition.mode is Mode.SHARED:
            self._shared[subscription, call.rights] = taken
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = self._door.loop.create_task(self._sweep(), name="runnel-http-seats")
        return taken

    def release(self, seat: PollingConsumer) -> None:
        """A request is over. When the listener closes, the consumer goes with its last request."""
        if self._door.is_closing and seat.is_free:
            seat.close()

    def _make_room(self, owner: Rights | None) -> None:
        """For one more: if there are too many, the one that has been idle for longest goes, the caller's own first."""
        consumers_max = self._door.settings.http.consumers_max
        own = [taken for taken in self._by_id.values() if taken.owner is owner]
        own_max = consumers_max if owner is None else max(1, consumers_max // _TOKENS_SHARE)
        if len(own) < own_max and len(self._by_id) < consumers_max:
            return
        idle = [taken.seat for taken in own if taken.seat.is_free]
        if not idle and len(own) < own_max:
            idle = [taken.seat for taken in self._by_id.values() if taken.seat.is_free]
        if not idle:
            raise LimitExceededError(
                f"http.consumers_max = {consumers_max}, of one token {own_max}: so many consumers have messages "
                "leased, or wait for some; no more are allowed"
            )
        min(idle, key=lambda seat: seat.used_ns).close()

    def _on_token_ended(self, owner: Rights) -> None:
        """What is leased with it goes to others, and does not count as failed."""
        for taken in [each for each in self._by_id.values() if each.owner is owner]:
            taken.seat.close()

    def _forget(self, taken: Taken) -> None:
        self._by_id.pop(taken.seat.id, None)
        key = (taken.subscription, taken.member, taken.consumer, taken.owner)
        if self._by_key.get(key) is taken:
            del self._by_key[key]
        if self._shared.get((taken.subscription, taken.owner)) is taken:
            del self._shared[taken.subscription, taken.owner]

    # --- Time ---

    async def _sweep(self) -> None:
        """End what is idle, as long as there is any seat; all that nobody works at when the door closes."""
        closing = self._door.loop.create_task(self._door.closing.wait())
        try:
            while self._by_id and not self._door.is_closing:
                sleeping = self._door.loop.create_task(
                    self._door.broker.clock.sleep(_SWEEP_SECONDS)
                )
                await asyncio.wait({sleeping, closing}, return_when=asyncio.FIRST_COMPLETED)
                sleeping.cancel()
                self._end_idle()
        finally:
            closing.cancel()

    def _end_idle(self) -> None:
        now_ns = self._door.broker.clock.monotonic_ns()
        for taken in list(self._by_id.values()):
            seat = taken.seat
            seat.forget_acked()
            is_idle = self._door.is_closing or now_ns - seat.used_ns >= _IDLE_NS_MAX
            if is_idle and not seat.is_closed and seat.is_free:
                seat.close()

    def _close(self) -> None:
        """The door is closed: nobody will say what became of what is leased here."""
        for taken in list(self._by_id.values()):
            taken.seat.close()
        self._door.gate.on_token_ended.remove(self._on_token_ended)
        _of_doors.pop(self._door, None)


def check_rights(call: Call, taken: Taken) -> None:
    """The caller's rights may be others than when the seat was made."""
    if call.rights is not None:
        call.rights.check_patterns(Right.CONSUME, taken.seat.consumer.definition.patterns)


_of_doors: Final[dict[HttpDoor, Seats]] = {}  # until they are closed


def seats_of(door: HttpDoor) -> Seats:
    seats = _of_doors.get(door)
    if seats is None:
        seats = _of_doors[door] = Seats(door)
    return seats
