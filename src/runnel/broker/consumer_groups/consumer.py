"""One consumer of a connection, as its door holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from runnel.broker.consumer_groups.consumer_group import ConsumerGroup
from runnel.formats.work_heads import Part, Picked
from runnel.group_rules.definition import Definition


class WorkConsumer:
    """A seat in a consumer group. After `close`, or once the broker has ended it, whatever is said comes too late."""

    __slots__ = (
        "_consumer_group",
        "_is_closed",
        "_is_paused",
        "_is_slowed",
        "_on_closed",
        "_seat",
        "member",
    )

    def __init__(
        self,
        consumer_group: ConsumerGroup,
        seat: int,
        member: str,
        on_closed: Callable[[ConsumerGroup], None],
    ) -> None:
        self.member: Final = member
        self._consumer_group = consumer_group
        self._seat = seat
        self._on_closed = on_closed
        self._is_closed = False
        self._is_paused = False  # by its connection
        self._is_slowed = False  # by its token's quota

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def definition(self) -> Definition:
        return self._consumer_group.definition

    def start(self) -> None:
        """Nothing is delivered before."""
        self._consumer_group.start(self._seat)

    def ack(
        self, deliveries: Sequence[int], parts: Sequence[Part], picked: Sequence[Picked] = ()
    ) -> Sequence[Part]:
        """Which parts came too late. Whole deliveries that did are parts from 0 to 0."""
        return self._consumer_group.ack(self._seat, deliveries, parts, picked)

    def ack_up_to(self, topic: str, partition: int, offset: int) -> None:
        self._consumer_group.ack_up_to(self._seat, (topic, partition), offset)

    def nack(self, parts: Sequence[Part], *, delay_ns: int | None, reason: str) -> Sequence[Part]:
        return self._consumer_group.nack(self._seat, parts, delay_ns=delay_ns, reason=reason)

    def renew(self, deliveries: Sequence[int], *, lease_ns: int | None = None) -> None:
        self._consumer_group.renew(self._seat, deliveries, lease_ns=lease_ns)

    def recalled(self, parts: Sequence[Part]) -> None:
        self._consumer_group.recalled(self._seat, parts)

    def resize(self, window_messages: int, window_bytes: int) -> None:
        self._consumer_group.resize(self._seat, window_messages, window_bytes)

    def pause(self) -> None:
        """The connection is full: nothing more for now."""
        self._is_paused = True
        self._consumer_group.pause(self._seat)

    def resume(self) -> None:
        self._is_paused = False
        self._go_on()

    def slow(self) -> None:
        """Its token is over a rate: nothing more for now."""
        self._is_slowed = True
        self._consumer_group.pause(self._seat)

    def unslow(self) -> None:
        self._is_slowed = False
        self._go_on()

    def _go_on(self) -> None:
        if not (self._is_paused or self._is_slowed or self._is_closed):
            self._consumer_group.resume(self._seat)

    async def wait_stored(self) -> None:
        """Until everything that was acknowledged is stored. Raises what storing failed with."""
        await self._consumer_group.wait_stored()

    def close(self, *, is_clean: bool) -> None:
        """Leave. What is leased goes back; unless it leaves cleanly, that counts as a failed delivery."""
        if not self._is_closed:
            self._is_closed = True
            if self._consumer_group.leave(self._seat, is_clean=is_clean):
                self._on_closed(self._consumer_group)
