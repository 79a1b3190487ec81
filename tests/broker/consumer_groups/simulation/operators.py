"""What operators do: subscriptions paused, moved and deleted, dead letters settled, topics hidden."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from runnel.broker.consumer_groups.dead_letter_queues import SettleRequest
from runnel.errors import BusyError, RunnelError, UnknownTopicError
from runnel.formats.heads import Start
from runnel.formats.wire import PartitionPlace
from runnel.group_rules.definition import Mode
from tests.broker.consumer_groups.simulation.subject import Subject
from tests.group_rules import history as events
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.history import History


def note_stored(
    history: History, subject: Subject, group: str, number: int, *, is_consumers: bool = False
) -> None:
    if any(each == group for each, _ in subject.inexact):
        return  # acknowledgements from before the loss of a shard are no longer asked for
    if subject.id in history.recorder.subjects and group in subject.checker.groups:
        stored = events.Stored(
            history.recorder.now_ns, group, events=number, is_consumers=is_consumers
        )
        history.recorder.see(subject, stored)


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
    places = [key for key in history.recorder.stock.messages if subject.matches(key[0])]
    places = [key for key in places if key[0] in history.recorder.stock.topics]
    if places and random.random() < 0.5:
        chosen = random.sample(places, random.randint(1, len(places)))
        start = Start(
            "offsets",
            [
                PartitionPlace(*key, random.randint(1, history.recorder.stock.end(key)))
                for key in chosen
            ],
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
            note_stored(history, subject, group, numbers[-1])


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
        SettleRequest(subject.name, offsets, is_all=random.random() < 0.2, is_redriven=is_redriven)
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
    topics = sorted(topic for topic in history.recorder.stock.topics if not topic.startswith("!"))
    recorder = history.recorder
    topics = [
        topic
        for topic in topics
        if not any(
            recorder.is_away((topic, number)) for number in range(recorder.stock.partitions(topic))
        )
    ]
    if topics:
        topic = history.random.choice(topics)
        # Publishes beside it would be hidden or not, as it happens: they wait for each other.
        history.recorder.stock.hiding(topic)
        try:
            while history.answers:
                await history.take_turns(1)
            ends = history.recorder.stock.ends(topic)
            is_done = await _ask(history, act(topic), f"{topic} is {what}")
        finally:
            history.recorder.stock.hidden(topic)
        if is_done:
            history.recorder.stock.surely_hidden(ends)
