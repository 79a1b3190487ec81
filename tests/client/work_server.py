"""A broker made of frames that accepts consumers; the test decides what it delivers, recalls and calls late."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from runnel.formats import wire, work_heads
from runnel.formats.batch import Batch
from runnel.formats.envelope import pack64
from runnel.formats.message import Message
from runnel.formats.work_heads import (
    Ack,
    Attempt,
    DeliveryPart,
    Lease,
    Nack,
    Recalled,
    Renew,
    WorkOptions,
)
from tests.client.fake_server import RECEIVE_TIME_NS, FakeServer, Peer

OPTIONS = WorkOptions(30_000, 3_600_000, 8, 1_000, 300_000, 2.0, 3_600_000)


class WorkServer(FakeServer):
    """Does the usual about consumers: accepts them, stores acks, lets them go."""

    def __init__(self, *, mode: str = "shared", options: WorkOptions = OPTIONS) -> None:
        super().__init__()
        self.mode = mode
        self.options = options
        self.late: list[DeliveryPart] = []  # of the next ack that is answered
        self._delivery = 0

    def react_usually(self, peer: Peer, request: wire.Request, tail: memoryview) -> None:
        match request:
            case work_heads.Consume():
                peer.say(
                    work_heads.Consuming(
                        request.id,
                        request.consumer,
                        request.subscription,
                        request.mode or self.mode,
                        request.patterns or ("a",),
                        self.options,
                        request.member,
                    )
                )
            case work_heads.Ack() if request.id:
                late, self.late = self.late, []
                peer.say(work_heads.AckedHead(request.id, late))
            case work_heads.Leave():
                peer.say(wire.Done(request.id))
            case _:
                super().react_usually(peer, request, tail)

    # --- Saying ---

    def lease(
        self,
        *payloads: bytes,
        topic: str = "a",
        offset: int = 1,
        keys: Sequence[bytes | None] = (),
        attempts: Sequence[Attempt] = (),
        consumer: int = 1,
    ) -> int:
        """Deliver messages of consecutive offsets; the delivery's number."""
        batch = _batch(topic, offset, payloads, keys)
        return self.lease_batch(
            batch, topic, offset, offset + len(payloads), attempts=attempts, consumer=consumer
        )

    def lease_batch(
        self,
        batch: Batch,
        topic: str,
        begin: int,
        end: int,
        *,
        attempts: Sequence[Attempt] = (),
        consumer: int = 1,
    ) -> int:
        self._delivery += 1
        lease = Lease(self._delivery, topic, 0, begin, end, attempts)
        self.peer.say(work_heads.WorkHead(consumer, [lease]), batch.pack())
        return self._delivery

    def recall(self, *parts: DeliveryPart) -> None:
        self.peer.say(work_heads.Recall(1, parts))

    def say_late(self, *parts: DeliveryPart) -> None:
        self.peer.say(work_heads.Late(1, parts))

    def end_consumer(self, code: str, *, retriable: bool) -> None:
        self.peer.say(work_heads.ConsumerEnded(1, code, f"ended with {code}", retriable))

    # --- What was said ---

    @property
    def acked(self) -> list[int | DeliveryPart]:
        """Deliveries that were acked whole, and parts of others, in their order."""
        acked: list[int | DeliveryPart] = []
        for ack in self.asked(Ack):
            acked += (*ack.deliveries, *ack.parts)
        return acked

    @property
    def nacked(self) -> list[DeliveryPart]:
        return [part for nack in self.asked(Nack) for part in nack.parts]

    @property
    def given_up(self) -> list[DeliveryPart]:
        return [part for recalled in self.asked(Recalled) for part in recalled.parts]

    @property
    def renewed(self) -> list[Sequence[int]]:
        return [tuple(renew.deliveries) for renew in self.asked(Renew)]


def with_hole(topic: str, first: Sequence[bytes], second: Sequence[bytes], *, gap: int) -> Batch:
    """A batch whose offsets begin at 1, and leave some out in the middle."""
    batches = [
        _batch(topic, 1, first, ()),
        _batch(topic, len(first) + gap + 1, second, ()),
    ]
    return Batch.join(batches)


def _batch(
    topic: str, offset: int, payloads: Sequence[bytes], keys: Sequence[bytes | None]
) -> Batch:
    messages = [
        Message(topic, payload, key=keys[row] if keys else None)
        for row, payload in enumerate(payloads)
    ]
    batch = Batch.from_messages(messages)
    batch.envelope = msgspec.structs.replace(
        batch.envelope,
        base_offsets=pack64([offset]),
        receive_times=pack64([RECEIVE_TIME_NS]),
        epochs=pack64([1]),
        entries=pack64([1]),
    )
    return batch
