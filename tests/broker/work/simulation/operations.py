"""What a history may do: every operation is a function of the history; `draw` chooses one."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from runnel.broker.broker import Level
from runnel.errors import BusyError, RunnelError, UnknownTopicError
from runnel.formats.batch import Batch
from runnel.formats.heads import Start
from runnel.formats.message import Message
from runnel.formats.wire import PartitionPlace
from runnel.subscriptions.definition import Mode
from tests.broker.work.simulation import answering
from tests.broker.work.simulation.hand import Hand
from tests.broker.work.simulation.joining import consume, dismiss
from tests.broker.work.simulation.plan import JOURNALS, SECOND_NS, Trouble
from tests.broker.work.simulation.recorder import Subject, is_unnamed
from tests.fakes.disk import Kind
from tests.fakes.power import PowerLoss
from tests.subscriptions import history as events
from tests.subscriptions.telling import Violation

if TYPE_CHECKING:
    from tests.broker.work.simulation.history import History

Operation = Callable[["History"], Coroutine[Any, Any, None]]

_FAULTS: Final = (
    (Kind.WRITE, errno.EIO),
    (Kind.WRITE, errno.EIO),
    (Kind.WRITE, errno.ENOSPC),
    (Kind.SYNC, errno.EIO),
    (Kind.ALLOCATE, errno.ENOSPC),
    (Kind.CREATE, errno.EIO),
    (Kind.RENAME, errno.EIO),
    (Kind.REMOVE, errno.EIO),
    (Kind.TRUNCATE, errno.EIO),
    (Kind.SYNC_DIRECTORY, errno.EIO),
    (Kind.READ, errno.EIO),
    (Kind.OPEN, errno.EIO),
)


def draw(history: History) -> tuple[Operation, bool]:
    """An operation, and whether it runs beside what follows."""
    choices = dict(_PLAIN)
    for trouble in Trouble:
        if trouble in history.plan.troubles:
            choices |= _TROUBLES[trouble]
    [operation] = history.random.choices(list(choices), list(choices.values()))
    return operation, operation in _BESIDE and history.random.random() < 0.4


# --- Publishing, time ---


async def publish(history: History) -> None:
    random = history.random
    for _ in range(random.choice((1, 1, 1, 3))):
        topics = JOURNALS[random.choice(list(JOURNALS))]
        # The first are the usual ones.
        chosen = sorted(set(random.choices(topics, range(4 * len(topics), 0, -4), k=2)))
        chosen = [topic for topic in chosen if not history.recorder.is_hiding(topic)]
        messages = []
        for topic in chosen[: random.choice((1, 1, 2))]:
            partitions = history.recorder.partitions(topic)
            partition = random.randrange(partitions)
            for _ in range(random.choice((1, 1, 2, 3, 8))):
                history.message_count += 1
                payload = b"m%d" % history.message_count
                messages.append(
                    Message(topic, payload, random.choice(history.plan.keys), partition=partition)
                )
        if not messages:
            continue
        level = random.choice((None, Level.STORED, Level.RECEIVED))
        history.say(f"publish {len(messages)} to {', '.join(chosen)}")
        try:
            history.answers.append(history.broker.publish(Batch.from_messages(messages), level))
        except BusyError:
            return
        except RunnelError as error:
            history.accept_failure(error)


async def pass_time(history: History) -> None:
    random = history.random
    for hand in history.hands:
        if hand.is_at_work and random.random() < 0.8:
            hand.consumer.renew(list(hand.client.inbox))
    times = [crew.group.next_time_ns() for crew in history.work.crews()]
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
        for group, crew in subject.crews.items():
            if not crew.consumers or group not in subject.checker.groups:
                continue
            if not history.was_faulty:
                recorder.see(subject, events.Expired(recorder.now_ns, group))
                if not subject.is_paused:
                    recorder.see(subject, events.Rested(recorder.now_ns, group))
            for key in subject.checker.group(group).partitions:
                state = crew.group.partition_state(key)
                if state is None:
                    recorder.violate(Violation(f"{subject.name} {group!r} does not cover {key}"))
                floor, done = state.acked.standing()
                in_flight = crew.group.partition_in_flight(key)
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
        _note_stored(history, subject, group, number, is_consumers=True)


def _note_stored(
    history: History, subject: Subject, group: str, number: int, *, is_consumers: bool = False
) -> None:
    if subject.id in history.recorder.subjects and group in subject.checker.groups:
        stored = events.Stored(
            history.recorder.now_ns, group, events=number, is_consumers=is_consumers
        )
        history.recorder.see(subject, stored)


# --- Operators ---


def _any_subject(history: History) -> Subject | None:
    made = [each for each in history.recorder.subjects.values() if each.is_made]
    return history.random.choice(made) if made else None


async def _ask(history: History, asked: Awaitable[Any], what: str) -> bool:
    """Whether it was done. If the subscription, member or topic is gone meanwhile, that is an answer, too."""
    history.say(f"{what} …")
    try:
        answer = await history.patiently(asked, what)
    except (UnknownTopicError, BusyError) as error:
        history.say(f"   {what}: {error}")
        return False
    except (RunnelError, OSError) as error:
        if type(error).__name__ not in ("UnknownSubscriptionError", "ClientFault"):
            history.accept_failure(error)
        return False
    history.say(f"   {what}: {answer}")
    return True


async def pause(history: History) -> None:
    subject = _any_subject(history)
    if subject is None:
        return
    is_paused = not subject.is_paused or history.random.random() < 0.2
    subject.pausing.append(is_paused)
    asked = history.work.pause_subscription(subject.name, is_paused=is_paused)
    if await _ask(history, asked, f"{subject.name} is paused: {is_paused}"):
        subject.pausing.remove(is_paused)
        look_at_definitions(history)


def look_at_definitions(history: History) -> None:
    history.recorder.defined_now(history.work.definitions())


async def move(history: History) -> None:
    subject = _any_subject(history)
    if subject is None:
        return
    random = history.random
    start = Start(random.choice(("earliest", "latest")))
    places = [key for key in history.recorder.messages if subject.matches(key[0])]
    places = [key for key in places if key[0] in history.recorder.topics]
    if places and random.random() < 0.5:
        chosen = random.sample(places, random.randint(1, len(places)))
        start = Start(
            "offsets",
            [PartitionPlace(*key, random.randint(1, history.recorder.end(key))) for key in chosen],
        )
    member = None
    if subject.mode is Mode.MULTICAST and subject.members and random.random() < 0.5:
        member = random.choice(sorted(subject.members))
    asked = history.work.move_subscription(subject.name, start, member)
    if await _ask(history, asked, f"{subject.name} is moved to {start.kind} {start.partitions}"):
        _last_is_stored(history, subject, events.Moved)


def _last_is_stored(history: History, subject: Subject, kind: type[events.Event]) -> None:
    """The answer means that what was done for it is stored."""
    for group in subject.checker.groups:
        numbers = [
            number
            for number, event in enumerate(subject.checker.history, 1)
            if isinstance(event, kind) and event.group == group
        ]
        if numbers:
            _note_stored(history, subject, group, numbers[-1])


async def delete_subscription(history: History) -> None:
    subject = _any_subject(history)
    if subject is None:
        return
    subject.may_be_deleted = True
    asked = history.work.delete_subscription(subject.name)
    if await _ask(history, asked, f"{subject.name} is deleted"):
        history.recorder.deleted.add(subject.id)
        look_at_definitions(history)


async def remove_member(history: History) -> None:
    subject = _any_subject(history)
    if subject is None or not subject.members:
        return
    member = history.random.choice(sorted(subject.members))
    subject.members.discard(member)
    await _ask(
        history,
        history.work.remove_member(subject.name, member),
        f"member {member} of {subject.name} is removed",
    )
    look_at_definitions(history)


async def settle_dead(history: History) -> None:
    """Some dead letters are sent back, or dropped, or all of them."""
    subject = _any_subject(history)
    if subject is None:
        return
    random = history.random
    try:
        listing = history.work.dead_letters(subject.name, 0, 10)
        batches, _ = await history.patiently(listing, "listing dead letters")
    except (RunnelError, OSError) as error:
        if type(error).__name__ != "UnknownSubscriptionError":
            history.accept_failure(error)
        return
    found = [message.offset for batch in batches for message in batch]
    known = history.settled.setdefault(subject.name, set())
    if known & set(found):
        raise Violation(f"dead letters of {subject.name} were settled, and are open: {found}")
    if not found:
        return
    offsets = random.sample(found, random.randint(1, len(found)))
    is_redriven = random.random() < 0.7
    asked = history.work.settle_dead(
        subject.name, offsets, is_all=random.random() < 0.2, is_redriven=is_redriven
    )
    what = "sent back" if is_redriven else "dropped"
    if await _ask(history, asked, f"dead letters {offsets} of {subject.name} are {what}"):
        known |= set(offsets)
        _last_is_stored(history, subject, events.Reopened)


async def purge(history: History) -> None:
    await _hide(history, "purged", history.broker.purge_topic)


async def delete_topic(history: History) -> None:
    await _hide(history, "deleted", history.broker.delete_topic)


async def _hide(history: History, what: str, act: Callable[[str], Awaitable[None]]) -> None:
    topics = sorted(topic for topic in history.recorder.topics if not topic.startswith("!"))
    if topics:
        topic = history.random.choice(topics)
        # Publishes beside it would be hidden or not, as it happens: they wait for each other.
        history.recorder.hiding(topic)
        try:
            while history.answers:
                await history.take_turns(1)
            ends = history.recorder.ends(topic)
            is_done = await _ask(history, act(topic), f"{topic} is {what}")
        finally:
            history.recorder.hidden(topic)
        if is_done:
            history.recorder.surely_hidden(ends)


# --- Troubles ---


async def crash(history: History) -> None:
    if history.random.random() < 0.4:
        history.say("power loss")
        history.disk.crash()
        raise PowerLoss("now")
    operation = len(history.disk.operations) + history.random.randint(1, 30)
    history.say(f"power loss in disk operation {operation}")
    history.disk.crash_at(operation)


async def kill(history: History) -> None:
    if history.random.random() < 0.4:
        history.say("kill")
        history.disk.kill()
        raise PowerLoss("killed")
    operation = len(history.disk.operations) + history.random.randint(1, 30)
    history.say(f"kill in disk operation {operation}")
    history.disk.kill_at(operation)


async def break_disk(history: History) -> None:
    if history.has_faults:
        await mend(history)
        return
    random = history.random
    kind, number = random.choice(_FAULTS)
    part = random.choice(("state/", "state/", ".segment", "catalogue", ""))
    times = random.choice((1, 1, 3, None))
    history.say(f"fault: {kind.name} of …{part} fails with {errno.errorcode[number]} ({times=})")
    history.disk.fail(
        kind, number, path=lambda path: part in path, skip=random.randint(0, 3), times=times
    )
    history.has_faults = history.was_faulty = True


async def fill_disk(history: History) -> None:
    if history.has_faults:
        await mend(history)
        return
    room = history.random.choice((0, 100, 1_000))
    history.say(f"disk full but for {room} bytes")
    history.disk.capacity_bytes = history.disk.used_bytes + room
    history.has_faults = history.was_faulty = True


async def mend(history: History) -> None:
    """The disk is well again, and the broker goes on as well as it can."""
    history.say("the disk is well again")
    history.heal()
    history.clock.advance(2 * SECOND_NS)
    await history.take_turns(20)


async def leave_while_joining(history: History) -> None:
    await consume(history, turns_max=history.random.randint(0, 30))


async def leave_operation(history: History) -> None:
    """Whoever waits for an answer may leave: what it began goes on, or leaves nothing behind."""
    if not history.beside:
        return
    name, work = history.beside.pop(0)
    history.say(f"   {name} is cancelled")
    work.cancel()
    await asyncio.wait([work])
    if not work.cancelled() and (error := work.exception()) is not None:
        raise error


async def join(history: History) -> None:
    await consume(history)


_PLAIN: Final[dict[Operation, float]] = {
    publish: 22,
    join: 24,
    leave: 2,
    answering.ack: 24,
    answering.ack_whole: 10,
    answering.ack_up_to: 4,
    answering.renew: 3,
    answering.give_back: 6,
    answering.resize: 3,
    wait_stored: 8,
    pass_time: 10,
    trim: 5,
    look: 3,
    restart: 1,
}
_TROUBLES: Final[dict[Trouble, dict[Operation, float]]] = {
    Trouble.CRASHES: {crash: 5},
    Trouble.KILLS: {kill: 4},
    Trouble.FAULTS: {break_disk: 6},
    Trouble.FULL: {fill_disk: 4},
    Trouble.LOSSES: {lose: 5},
    Trouble.STALLS: {stall: 5},
    Trouble.NACKS: {answering.nack: 18},
    Trouble.RUBBISH: {answering.rubbish: 6},
    Trouble.OPERATORS: {
        pause: 4,
        move: 3,
        delete_subscription: 1,
        remove_member: 1,
        settle_dead: 6,
    },
    Trouble.HIDING: {purge: 2, delete_topic: 2},
    Trouble.LEAVING: {leave_while_joining: 4, leave_operation: 5},
}
_BESIDE: Final[frozenset[Operation]] = frozenset(
    {
        join,
        wait_stored,
        trim,
        pause,
        move,
        delete_subscription,
        remove_member,
        settle_dead,
        purge,
        delete_topic,
    }
)
