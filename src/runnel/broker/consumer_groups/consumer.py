"""A consumer of one connection, as its listener uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from runnel.broker.consumer_groups.consumer_group import ConsumerGroup
from runnel.formats.work_heads import DeliveryPart, Picked
from runnel.group_rules.definition import Definition


class OpenConsumer(Protocol):
    """A consumer as protocols use it: of this broker, or with a part at each of several nodes.

    Its methods are those of `WorkConsumer`.
    """

    @property
    def member(self) -> str: ...
    @property
    def is_closed(self) -> bool: ...
    @property
    def definition(self) -> Definition: ...
    @property
    def leased(self) -> tuple[int, int]: ...
    def start(self) -> None: ...
    def ack(
        self,
        deliveries: Sequence[int],
        parts: Sequence[DeliveryPart],
        picked: Sequence[Picked] = (),
    ) -> Sequence[DeliveryPart]: ...
    def ack_up_to(self, topic: str, partition: int, offset: int) -> None: ...
    def nack(
        self, parts: Sequence[DeliveryPart], *, delay_ns: int | None, reason: str
    ) -> Sequence[DeliveryPart]: ...
    def give_back(self, parts: Sequence[DeliveryPart]) -> None: ...
    def missing(self, parts: Sequence[DeliveryPart]) -> Sequence[DeliveryPart]: ...
    def renew(self, deliveries: Sequence[int], *, lease_ns: int | None = None) -> None: ...
    def recalled(self, parts: Sequence[DeliveryPart]) -> None: ...
    def resize(self, window_messages: int, window_bytes: int, moves_known: int = 0) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    async def wait_stored(self) -> Sequence[DeliveryPart]: ...
    def close(self, *, is_clean: bool) -> None: ...


class WorkConsumer:
    """A consumer in a consumer group. After `close`, or once the broker has ended it, every call comes too late."""

    __slots__ = (
        "_consumer_group",
        "_consumer_id",
        "_is_closed",
        "_is_paused",
        "_is_slowed",
        "_on_closed",
        "member",
    )

    def __init__(
        self,
        consumer_group: ConsumerGroup,
        consumer_id: int,
        member: str,
        on_closed: Callable[[ConsumerGroup], None],
    ) -> None:
        self.member: Final = member
        self._consumer_group = consumer_group
        self._consumer_id = consumer_id
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
        """Begin to deliver. Nothing is delivered before."""
        self._consumer_group.start(self._consumer_id)

    def ack(
        self,
        deliveries: Sequence[int],
        parts: Sequence[DeliveryPart],
        picked: Sequence[Picked] = (),
    ) -> Sequence[DeliveryPart]:
        """Acknowledge messages. Returns the parts that came too late; a whole late delivery is a part from 0 to 0."""
        return self._consumer_group.ack(self._consumer_id, deliveries, parts, picked)

    def ack_up_to(self, topic: str, partition: int, offset: int) -> None:
        self._consumer_group.ack_up_to(self._consumer_id, (topic, partition), offset)

    def nack(
        self, parts: Sequence[DeliveryPart], *, delay_ns: int | None, reason: str
    ) -> Sequence[DeliveryPart]:
        return self._consumer_group.nack(self._consumer_id, parts, delay_ns=delay_ns, reason=reason)

    def give_back(self, parts: Sequence[DeliveryPart]) -> None:
        """Return messages on which no work has begun. They come again at once, and no failure is counted."""
        self._consumer_group.give_back(self._consumer_id, parts)

    def missing(self, parts: Sequence[DeliveryPart]) -> Sequence[DeliveryPart]:
        """Which of these messages the consumer does not have, or does not have any more."""
        return self._consumer_group.group.missing(self._consumer_id, parts)

    @property
    def leased(self) -> tuple[int, int]:
        """How many messages and bytes the consumer has."""
        return self._consumer_group.group.leased(self._consumer_id)

    def renew(self, deliveries: Sequence[int], *, lease_ns: int | None = None) -> None:
        self._consumer_group.renew(self._consumer_id, deliveries, lease_ns=lease_ns)

    def recalled(self, parts: Sequence[DeliveryPart]) -> None:
        self._consumer_group.recalled(self._consumer_id, parts)

    def resize(self, window_messages: int, window_bytes: int, moves_known: int = 0) -> None:
        self._consumer_group.resize(self._consumer_id, window_messages, window_bytes, moves_known)

    def pause(self) -> None:
        """Deliver nothing more for now: the connection is full."""
        self._is_paused = True
        self._consumer_group.pause(self._consumer_id)

    def resume(self) -> None:
        self._is_paused = False
        self._resume_if_free()

    def slow(self) -> None:
        """Deliver nothing more for now: the token is over a rate."""
        self._is_slowed = True
        self._consumer_group.pause(self._consumer_id)

    def unslow(self) -> None:
        self._is_slowed = False
        self._resume_if_free()

    def _resume_if_free(self) -> None:
        if not (self._is_paused or self._is_slowed or self._is_closed):
            self._consumer_group.resume(self._consumer_id)

    async def wait_stored(self) -> Sequence[DeliveryPart]:
        """Wait until every acknowledgement so far is stored. Raises the error if storing fails.

        Returns what is known only now to have come too late: nothing, unless other nodes have to say so.
        """
        await self._consumer_group.wait_stored(self._consumer_id)
        return ()

    def close(self, *, is_clean: bool) -> None:
        """Leave the group. Leased messages go back; unless `is_clean`, that counts as a failed delivery."""
        if not self._is_closed:
            self._is_closed = True
            if self._consumer_group.leave(self._consumer_id, is_clean=is_clean):
                self._on_closed(self._consumer_group)
