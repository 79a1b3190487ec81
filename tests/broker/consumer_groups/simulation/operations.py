"""What a history does: every operation is a function of the history, and `TABLE` draws one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from runnel.broker.broker import Level
from runnel.errors import BusyError, RunnelError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.log import ShardId
from tests.broker.consumer_groups.simulation import answers, operators, troubles
from tests.broker.consumer_groups.simulation.hand import Hand
from tests.broker.consumer_groups.simulation.membership import consume, dismiss
from tests.broker.consumer_groups.simulation.operators import note_stored
from tests.broker.consumer_groups.simulation.plan import JOURNALS, SECOND_NS
from tests.broker.consumer_groups.simulation.subject import is_unnamed
from tests.group_rules import history as events
from tests.simulation.history import Violation
from tests.simulation.operations import OperationTable
from tests.simulation.troubles import Trouble, cancel_operation

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.history import History

Operation = Callable[["History"], Coroutine[Any, Any, None]]


# --- Publishing, time ---


async def publish(history: History) -> None:
    random = history.random
    for _ in range(random.choice((1, 1, 1, 3))):
        topics = JOURNALS[random.choice(list(JOURNALS))]
        # The first are the usual ones.
        chosen = sorted(set(random.choices(topics, range(4 * len(topics), 0, -4), k=2)))
        chosen = [topic for topic in chosen if not history.recorder.stock.is_hiding(topic)]
        messages: dict[ShardId, list[Message]] = {}
        for topic in chosen[: random.choice((1, 1, 2))]:
            partitions = history.recorder.stock.partitions(topic)
            partition = random.randrange(partitions)
            for _ in range(random.choice((1, 1, 2, 3, 8))):
                history.message_count += 1
                payload = b"m%d" % history.message_count
                messages.setdefault(history.shard_of((topic, partition)), []).append(
                    Message(topic, payload, random.choice(history.plan.keys), partition=partition)
                )
        if not messages:
            continue
        level = random.choice((None, Level.STORED, Level.RECEIVED))
        count = sum(map(len, messages.values()))
        history.say(f"publish {count} to {', '.join(chosen)}")
        try:
            for some in messages.values():
                history.answers.append(history.broker.publish(Batch.from_messages(some), level))
        except BusyError:
            return
        except RunnelError as error:
            history.accept_failure(error)


async def pass_time(history: History) -> None:
    random = history.random
    for hand in history.hands:
        if hand.is_at_work and random.random() < 0.8:
            hand.consumer.renew(list(hand.client.inbox))
    times = [
        consumer_group.group.next_time_ns() for consumer_group in history.work.consumer_groups()
    ]
    next_ns = min((time for time in times if time is not None), default=0)
    left_ns = next_ns - history.clock.monotonic_ns()
    if left_ns > 0 and random.random() < 0.4:
        duration_ns = left_ns
    else:
        duration_ns = random.choice((1, 300, 999, 1_000, 5_000, 31_000)) * SECOND_NS // 1000
    history.clock.advance(duration_ns)
    await history.take_turns(random.choice((2, 20)))


async def look(history: History) -> None:
    """At rest, everybody with room has what can be delivered, and everything is as its group says."""
    await history.finish_beside()
    await history.come_to_rest()
    see_rest(history)


def see_rest(history: History) -> None:
    recorder = history.recorder
    for subject in recorder.subjects.values():
        for group, consumer_group in subject.consumer_groups.items():
            if not consumer_group.consumers or group not in subject.checker.groups:
                continue
            if not history.was_faulty:
                recorder.see(subject, events.Expired(recorder.now_ns, group))
                if not subject.is_paused:
                    recorder.see(subject, events.Rested(recorder.now_ns, group))
            for key in subject.checker.group(group).partitions:
                if recorder.is_away(key):
                    continue
                state = consumer_group.group.partition_state(key)
                if state is None:
                    recorder.violate(Violation(f"{subject.name} {group!r} does not cover {key}"))
                floor, done = state.acked.snapshot()
                in_flight = consumer_group.group.partition_in_flight(key)
                stated = events.Stated(
                    recorder.now_ns, group, place=key, floor=floor, done=done, in_flight=in_flight
                )
                recorder.see(subject, stated)


async def restart(history: History) -> None:
    await history.restart()


async def trim(history: History) -> None:
    history.say("a round of retention …")
    for log in history.broker._stores.kept:
        for shard in log.shards():
            try:
                await history.patiently(log.trim_shard(shard), "trim")
            except (OSError, RunnelError) as error:
                history.accept_failure(error)


# --- Shards go and come ---


async def lose_shard(history: History) -> None:
    """A shard goes, as planned or without warning."""
    log = history.main
    shards = log.shards()
    if not shards:
        return
    shard, is_planned = history.random.choice(shards), history.random.random() < 0.5
    history.say(f"{shard} goes, {'as planned' if is_planned else 'without warning'} …")
    try:
        losing = log.release(shard) if is_planned else log.drop(shard)
        await history.patiently(losing, "losing a shard")
    except (OSError, RunnelError) as error:
        history.accept_failure(error)
    if shard in log.away:
        history.recorder.shard_goes(
            partial(history.is_in, shard), loses_nothing=is_planned and not history.was_faulty
        )


async def regain_shard(history: History) -> None:
    log = history.main
    for shard in log.away:
        try:
            await history.patiently(log.acquire(shard), "acquiring a shard")
        except (OSError, RunnelError) as error:
            history.accept_failure(error)
        else:
            history.say(f"{shard} is here again")
            history.recorder.shard_comes(partial(history.is_in, shard), history.work.stored_state)


# --- Consumers come and go ---


def _any_hand(history: History) -> Hand | None:
    return history.random.choice(history.hands) if history.hands else None


async def leave(history: History) -> None:
    if (hand := _any_hand(history)) is not None:
        dismiss(history, hand, is_clean=True)


async def lose(history: History) -> None:
    if (hand := _any_hand(history)) is not None:
        dismiss(history, hand, is_clean=False)


async def stall(history: History) -> None:
    if (hand := _any_hand(history)) is not None:
        stalled = hand.client.is_stalled
        hand.client.is_stalled = not stalled and history.random.random() < 0.6


async def wait_stored(history: History) -> None:
    """What was acknowledged when somebody asked is stored when there is an answer."""
    hand = _any_hand(history)
    if hand is None:
        return
    subject, group = hand.writer.subject, hand.writer.group
    number = subject.checker.number
    try:
        await history.patiently(hand.consumer.wait_stored(), "waiting until it is stored")
    except RunnelError as error:
        history.accept_failure(error)
        return
    if not is_unnamed(group):
        note_stored(history, subject, group, number, is_consumers=True)


# --- Consumers that leave while they join ---


async def leave_while_joining(history: History) -> None:
    await consume(history, turns_max=history.random.randint(0, 30))


async def join(history: History) -> None:
    await consume(history)


TABLE: Final[OperationTable[Operation]] = OperationTable(
    plain={
        publish: 22,
        join: 24,
        leave: 2,
        answers.ack: 24,
        answers.ack_whole: 10,
        answers.ack_up_to: 4,
        answers.renew: 3,
        answers.give_back: 6,
        answers.return_unbegun: 4,
        answers.resize: 3,
        wait_stored: 8,
        pass_time: 10,
        trim: 5,
        look: 3,
        restart: 1,
    },
    troubles={
        Trouble.POWER_LOSS: {troubles.crash: 5},
        Trouble.KILL: {troubles.kill: 4},
        Trouble.DISK_FAULT: {troubles.break_disk: 6},
        Trouble.DISK_FULL: {troubles.fill_disk: 4},
        Trouble.LOST_CONSUMER: {lose: 5},
        Trouble.STALLED_CONSUMER: {stall: 5},
        Trouble.NACK: {answers.nack: 18},
        Trouble.BAD_ACK: {answers.rubbish: 6},
        Trouble.OPERATOR: {
            operators.pause: 4,
            operators.move: 3,
            operators.delete_subscription: 1,
            operators.remove_member: 1,
            operators.settle_dead: 6,
        },
        Trouble.TOPIC_REMOVAL: {operators.purge: 2, operators.delete_topic: 2},
        Trouble.LOST_SHARD: {lose_shard: 6, regain_shard: 8},
        Trouble.CANCELLATION: {leave_while_joining: 4, cancel_operation: 5},
    },
    beside={
        join,
        wait_stored,
        trim,
        operators.pause,
        operators.move,
        operators.delete_subscription,
        operators.remove_member,
        operators.settle_dead,
        operators.purge,
        operators.delete_topic,
    },
    beside_share=0.4,
)
