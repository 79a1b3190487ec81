"""What consumers say to the broker: acks of every kind, nacks, renewals, and rubbish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runnel.formats.work_heads import DeliveryPart, Picked
from tests.broker.consumer_groups.simulation.hand import Hand
from tests.group_rules.history import Stretch
from tests.group_rules.stage import bit_by_bit

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.history import History

MS = 1_000_000


def _any_worker(history: History) -> Hand | None:
    """One that has something to answer."""
    workers = [hand for hand in history.hands if hand.is_at_work]
    return history.random.choice(workers) if workers else None


async def ack(history: History) -> None:
    if (hand := _any_worker(history)) is not None:
        _ack(history, hand, hand.client.answer(history.random))


def _ack(history: History, hand: Hand, parts: Sequence[Stretch]) -> None:
    if history.random.random() < 0.4:
        hand.consumer.ack((), (), bit_by_bit(parts))
    else:
        hand.consumer.ack((), to_parts(parts))


async def ack_whole(history: History) -> None:
    if (hand := _any_worker(history)) is not None:
        delivery = history.random.choice(list(hand.client.inbox))
        hand.client.answer_whole(delivery)
        hand.consumer.ack([delivery], ())


async def ack_up_to(history: History) -> None:
    if (hand := _any_worker(history)) is not None:
        delivery = history.random.choice(list(hand.client.inbox))
        place = hand.client.places[delivery]
        offset = history.random.choice(hand.client.inbox[delivery])
        hand.client.answer_up_to(place, offset)
        hand.consumer.ack_up_to(*place, offset)


async def nack(history: History) -> None:
    if (hand := _any_worker(history)) is not None:
        random = history.random
        delay_ns = random.choice((None, None, 0, 50 * MS, 3000 * MS))
        is_front = random.random() < 0.4
        parts = hand.client.answer_first() if is_front else hand.client.answer(random)
        hand.consumer.nack(to_parts(parts), delay_ns=delay_ns, reason="no luck")


async def renew(history: History) -> None:
    if (hand := _any_worker(history)) is not None:
        lease_ns = history.random.choice((None, None, 0, 100 * MS, 60_000 * MS))
        hand.consumer.renew(list(hand.client.inbox), lease_ns=lease_ns)


async def give_back(history: History) -> None:
    asked = [hand for hand in history.hands if hand.client.recalled and not hand.client.is_stalled]
    if asked:
        hand = history.random.choice(asked)
        count = history.random.randint(1, len(hand.client.recalled))
        give_back_these(hand, history.random.sample(hand.client.recalled, count))


def give_back_these(hand: Hand, parts: Sequence[Stretch]) -> None:
    hand.client.give_back(parts)
    hand.consumer.recalled(to_parts(parts))


async def return_unbegun(history: History) -> None:
    if (hand := _any_worker(history)) is not None:
        is_front = history.random.random() < 0.4
        client = hand.client
        parts = client.answer_first() if is_front else client.answer(history.random)
        hand.consumer.give_back(to_parts(parts))


async def resize(history: History) -> None:
    """Another window, or a connection that is full for a while."""
    if not history.hands:
        return
    random = history.random
    hand = random.choice(history.hands)
    match random.randint(0, 3):
        case 0:
            hand.consumer.pause()
        case 1:
            hand.consumer.resume()
        case _:
            hand.consumer.resize(random.choice((0, 1, 5, 1000)), random.choice((100, 2_000, 10**6)))


async def rubbish(history: History) -> None:
    """Twice, late, of others, or of nothing."""
    if not history.hands:
        return
    random = history.random
    hand = random.choice(history.hands)
    other = random.choice(history.hands)
    parts = random.sample(other.client.answered, min(len(other.client.answered), 2))
    parts.append(Stretch(random.randint(0, 50), random.randint(0, 9), random.randint(0, 2**40)))
    match random.randint(0, 5):
        case 0:
            hand.consumer.ack([random.randint(0, 60), 2**62], to_parts(parts))
        case 1:
            hand.consumer.nack(to_parts(parts), delay_ns=0, reason="x" * 5000)
        case 2:
            hand.consumer.recalled(to_parts(parts))
        case 3:
            hand.consumer.give_back(to_parts(parts))
        case 4:
            hand.consumer.ack(
                (), (), [Picked(random.randint(0, 9), random.randint(0, 9), b"\xff\x01")]
            )
        case _:
            hand.consumer.ack_up_to("nowhere", 7, 2**62)


def to_parts(parts: Sequence[Stretch]) -> list[DeliveryPart]:
    return [DeliveryPart(part.delivery, part.begin, part.end) for part in parts]
