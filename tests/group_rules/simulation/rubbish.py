"""What no client library would say, and what a broken one might: all of it has to be harmless."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from random import Random

from runnel.errors import ClientFault
from tests.group_rules.history import Stretch
from tests.group_rules.simulation.consumer import SimulatedConsumer
from tests.group_rules.stage import Stage, stretches

NOBODY = 999
HUGE = 2**62


def talk_rubbish(stage: Stage, consumers: Mapping[int, SimulatedConsumer], random: Random) -> None:
    """One of it. A ClientFault is an answer too, if it changes nothing."""
    consumer = random.choice(list(consumers.values()))
    group = consumer.group
    number = random.choice((consumer.number, consumer.number, NOBODY))
    parts = _parts(consumer, consumers, random)
    deliveries = [random.choice((0, HUGE, *(part.delivery for part in parts)))]
    with contextlib.suppress(ClientFault):
        match random.randrange(8):
            case 0:
                stage.ack(group, number, (), parts)
            case 1:
                stage.ack(group, number, deliveries, ())
            case 2:
                stage.nack(group, number, parts, random.choice((None, 0)))
            case 3:
                stage.renew(group, NOBODY, deliveries)
            case 4:
                stage.give_back(group, number, parts)
            case 5:
                own = list(consumer.inbox)[-1:]
                once = stretches(own[0], consumer.inbox[own[0]]) if own else []
                if random.random() < 0.5:
                    stage.ack(group, consumer.number, own * 2, once, is_picked=True)
                else:
                    stage.ack(group, consumer.number, (), once * 2)
            case 6:
                stage.return_unbegun(group, number, parts)
            case 7:
                stage.ack_up_to(group, number, ("nowhere", 3), random.choice((0, 5, HUGE)))


def _parts(
    consumer: SimulatedConsumer, consumers: Mapping[int, SimulatedConsumer], random: Random
) -> list[Stretch]:
    choices: list[list[Stretch]] = [
        [Stretch(HUGE, 0, HUGE)],
        [Stretch(0, 1, 1)],
        [Stretch(1, 9, 2)],
        [Stretch(1, 1, 2), Stretch(1, 1, 3)],
        consumer.answered[-3:],
        [Stretch(delivery, 0, HUGE) for delivery in list(consumer.inbox)[:1]],
    ]
    others = [other for other in consumers.values() if other is not consumer and other.inbox]
    if others:
        delivery, offsets = random.choice(list(random.choice(others).inbox.items()))
        choices += [stretches(delivery, offsets)] * 4
    return random.choice(choices)
