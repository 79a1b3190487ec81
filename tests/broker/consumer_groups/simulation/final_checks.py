"""The end of a history: disk and consumers work again. Then no message may be left, also after one last crash."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnel.errors import MovedError
from runnel.group_rules.definition import Mode
from tests.broker.consumer_groups.simulation.answers import give_back_these, to_parts
from tests.broker.consumer_groups.simulation.membership import dismiss, forget_unnamed, join
from tests.broker.consumer_groups.simulation.operations import regain_shard, see_rest
from tests.broker.consumer_groups.simulation.operators import look_at_definitions
from tests.broker.consumer_groups.simulation.plan import SECOND_NS
from tests.group_rules import history as events
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.history import History

ROUNDS_MAX = 2_000
WINDOW = (1000, 10**6)


async def end(history: History) -> None:
    await history.finish_beside()
    history.say("everything is well again")
    history.heal_disk()
    await regain_shard(history)
    if history.was_faulty:
        await history.restart()
    await _finish(history)
    await _rest(history)
    if history.random.random() < 0.5:
        history.say("power loss, after all is stored")
        history.disk.crash()
        await history.recover()
    else:
        await history.restart()
    await _finish(history)


async def _finish(history: History) -> None:
    """Everybody works until nothing is left."""
    await history.come_to_rest()
    look_at_definitions(history)
    forget_unnamed(history)
    for subject in list(history.recorder.subjects.values()):
        subject.is_made = True  # it is there
        if subject.is_paused:
            subject.pausing.append(False)
            resuming = history.work.pause_subscription(subject.name, is_paused=False)
            await history.patiently(resuming, "going on")
            look_at_definitions(history)
    for hand in list(history.hands):
        if hand.error is not None or history.random.random() < 0.4:
            dismiss(history, hand, is_clean=history.random.random() < 0.5)
        else:
            hand.client.is_stalled = False
            hand.consumer.resume()
            hand.consumer.resize(*WINDOW)
    await _join_all(history)
    for _ in range(ROUNDS_MAX):
        await history.come_to_rest()
        if not _work(history) and not _pass_time(history):
            break
    else:
        raise Violation(f"work has not come to an end after {ROUNDS_MAX} rounds")
    see_rest(history)
    recorder = history.recorder
    for subject in recorder.subjects.values():
        recorder.see(subject, events.Finished(recorder.now_ns))
    await _check_states(history)
    for hand in history.hands:
        try:
            await history.patiently(hand.consumer.wait_stored(), "waiting until it is stored")
        except MovedError as error:  # of a shard that went without warning: told once
            history.accept_failure(error)
            await history.patiently(hand.consumer.wait_stored(), "waiting until it is stored")
    recorder.all_is_stored()


async def _join_all(history: History) -> None:
    plans = {plan.name: plan for plan in history.plan.subscriptions}
    for definition in history.work.definitions():
        plan = plans[definition.name]
        members = [""]
        if plan.mode is Mode.MULTICAST:
            members = [member.name for member in definition.members]
        for member in members:
            for hand in [hand for hand in history.hands if hand.error is not None]:
                dismiss(history, hand, is_clean=True)
            await join(history, plan, member, WINDOW)


def _work(history: History) -> bool:
    """Whether any consumer had work."""
    has_work = False
    for hand in history.hands:
        if hand.client.recalled:
            has_work = True
            give_back_these(hand, list(hand.client.recalled))
        while hand.client.inbox:
            has_work = True
            hand.consumer.ack((), to_parts(hand.client.answer(history.random)))
    return has_work


def _pass_time(history: History) -> bool:
    """Until a group has something to do by itself; whether any will."""
    times = [
        consumer_group.group.next_time_ns()
        for consumer_group in history.work.consumer_groups()
        if consumer_group.consumers
    ]
    next_ns = min((time for time in times if time is not None), default=None)
    if next_ns is None:
        return False
    history.clock.advance(max(0, next_ns - history.clock.monotonic_ns()))
    return True


async def _check_states(history: History) -> None:
    """The broker says so, too."""
    for state in await history.patiently(history.work.subscriptions(), "listing subscriptions"):
        for member in state.members:
            if member.backlog or member.in_flight:
                raise Violation(f"nothing is owed, and {state.name} says: {member}")
    for name, settled in history.settled.items():
        if history.subject(name) is None:
            continue
        listing = history.work.dead_letters(name, 0, 1000)
        batches, _ = await history.patiently(listing, "listing dead letters")
        still_open = {message.offset for batch in batches for message in batch} & settled
        if still_open:
            raise Violation(f"dead letters of {name} were settled, and are open: {still_open}")


async def _rest(history: History) -> None:
    """Without consumers no group stays active."""
    for hand in list(history.hands):
        dismiss(history, hand, is_clean=True)
    for _ in range(3):
        history.clock.advance(SECOND_NS)
        await history.come_to_rest()
    if history.work.consumer_groups() or history.work.consumer_groups_awake:
        raise Violation(f"nobody consumes, and these are at work: {history.work.consumer_groups()}")
