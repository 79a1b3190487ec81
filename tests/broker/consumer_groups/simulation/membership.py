"""Consumers that join subscriptions, make them on the way, or leave before they have joined."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from runnel.errors import RunnelError
from runnel.formats.heads import Start
from runnel.formats.work_heads import Consume
from runnel.group_rules.definition import Mode
from tests.broker.consumer_groups.simulation.hand import Hand
from tests.broker.consumer_groups.simulation.plan import SubscriptionPlan
from tests.broker.consumer_groups.simulation.subject import is_unnamed

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.history import History

MEMBERS = ("ann", "bob", "")


async def consume(history: History, turns_max: int | None = None) -> None:
    """One more consumer; with `turns_max` it leaves if it is not in by then."""
    random = history.random
    if len(history.hands) >= history.plan.consumers_max:
        return
    plan = random.choice(history.plan.subscriptions)
    member = random.choice(MEMBERS) if plan.mode is Mode.MULTICAST else ""
    window = (random.choice((1, 3, 10, 1000)), random.choice((100, 1_500, 10**6)))
    hand = await join(history, plan, member, window, turns_max)
    if hand is not None and random.random() < 0.05:
        hand.consumer.pause()


async def join(
    history: History,
    plan: SubscriptionPlan,
    member: str,
    window: tuple[int, int],
    turns_max: int | None = None,
) -> Hand | None:
    history.hand_count += 1
    hand = Hand(history.hand_count, plan.name, history.recorder)
    request = Consume(
        1,
        hand.number,
        plan.name,
        plan.patterns,
        plan.mode,
        *window,
        member,
        Start(plan.start),
        plan.options,
    )
    history.say(f"{hand} joins{f' as {member}' if member else ''} with a window of {window} …")
    consuming = asyncio.ensure_future(history.work.consume(hand.number, hand, request))
    try:
        if turns_max is not None:
            await history.take_turns(turns_max)
            if not consuming.done():
                consuming.cancel()
        consumer = await history.patiently(consuming, "joining")
    except (RunnelError, OSError) as error:
        history.accept_failure(error)
        forget_unnamed(history)
        return None
    except asyncio.CancelledError:
        consuming.cancel()
        await asyncio.wait([consuming])
        if not consuming.cancelled() and consuming.exception() is None:
            consuming.result().close(is_clean=False)  # it had joined, and its caller did not know
        forget_unnamed(history)
        if turns_max is None:
            raise
        history.say(f"{hand} has left before it was in")
        return None
    if not hand.begin(consumer):
        consumer.close(is_clean=False)
        return None
    subject = hand.writer.subject
    subject.is_made = True
    if member:
        subject.members.add(member)
    history.hands.append(hand)
    consumer.start()
    return hand


def dismiss(history: History, hand: Hand, *, is_clean: bool) -> None:
    history.hands.remove(hand)
    history.say(f"{hand} {'leaves' if is_clean else 'is lost'}")
    hand.consumer.close(is_clean=is_clean)
    forget_unnamed(history)


def forget_unnamed(history: History) -> None:
    """Nothing is owed to an unnamed member that is gone."""
    present = {(hand.writer.subject, hand.writer.group) for hand in history.hands}
    for subject in history.recorder.subjects.values():
        for group in filter(is_unnamed, subject.checker.groups):
            consumer_group = subject.consumer_groups.get(group)
            if (subject, group) not in present and (
                consumer_group is None or not consumer_group.consumers
            ):
                history.recorder.forget(subject, group)
