"""What a group has to answer to an event, held against what it did answer; and how a broken promise is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from tests.group_rules.facts import Count
from tests.group_rules.history import (
    WHOLE_END,
    Delivered,
    Event,
    Place,
    Published,
    Restarted,
    Stored,
    Stretch,
    message_text,
    offsets_text,
    seconds,
)
from tests.simulation.history import About, Violation

Span = tuple[int, int]


class Expected:
    """What a group has to answer, as the promises have it."""

    __slots__ = ("acked", "dead_letters", "expired", "failed", "late", "recalls")

    def __init__(self) -> None:
        self.late: dict[int, list[Span]] = {}
        self.recalls: set[tuple[int, int, int]] = set()  # consumer, delivery, offset
        self.dead_letters: dict[tuple[Place, int], int] = {}
        self.failed: dict[tuple[Place, int], Count] = {}
        self.acked: set[tuple[Place, int]] = set()
        self.expired: set[tuple[int, int]] = set()  # consumer, delivery

    def is_late(self, delivery: int, begin: int = 0, end: int = WHOLE_END) -> None:
        """These offsets of a delivery are; without any, all of it."""
        if begin < end:
            self.late.setdefault(delivery, []).append((begin, end))


def compare(event: Event, expected: Expected) -> None:
    """Raise a Violation if the group answered anything else."""
    told = event.told_of()
    _compare_acked(event, expected)
    _compare_failed(event, expected)
    dead_letters = {
        (dead_letter.place, dead_letter.offset): dead_letter.failures
        for dead_letter in told.dead_letters
    }
    for (place, offset), failures in dead_letters.items():
        if expected.dead_letters.get((place, offset)) != failures:
            raise Violation(
                f"{message_text(place, offset)} was to be dead-lettered after {failures} failures, out of turn",
                (place, {offset}),
            )
    for place, offset in expected.dead_letters.keys() - dead_letters.keys():
        raise Violation(
            f"{message_text(place, offset)} failed too often, and was not to be dead-lettered",
            (place, {offset}),
        )
    if len(dead_letters) != len(told.dead_letters):
        raise Violation("a message was to be dead-lettered twice at once")
    recalls = {
        (recall.consumer, recall.stretch.delivery, offset)
        for recall in told.recalls
        for offset in range(recall.stretch.begin, recall.stretch.end)
    }
    for consumer, delivery, offset in expected.recalls - recalls:
        raise Violation(
            f"@{offset} of delivery {delivery} was not recalled from consumer {consumer}"
        )
    for consumer, delivery, offset in recalls - expected.recalls:
        raise Violation(
            f"@{offset} of delivery {delivery} was recalled from consumer {consumer} for no reason"
        )
    _compare_late(told.late, expected.late)
    if sorted(told.expired) != sorted(expected.expired):
        raise Violation(
            f"leases of (consumer, delivery) {sorted(expected.expired)} have ended by time, "
            f"and {sorted(told.expired)} was told"
        )


def _compare_acked(event: Event, expected: Expected) -> None:
    told = {
        (place, offset)
        for place, begin, end in event.told_of().acked
        for offset in range(begin, end)
    }
    for place, offset in sorted(expected.acked - told):
        raise Violation(
            f"that {message_text(place, offset)} is done was not told, so nobody stores it",
            (place, {offset}),
        )
    for place, offset in sorted(told - expected.acked):
        raise Violation(
            f"{message_text(place, offset)} was told to be done, and is not now, or was before",
            (place, {offset}),
        )


def _compare_failed(event: Event, expected: Expected) -> None:
    failed = {(failure.place, failure.offset): failure for failure in event.told_of().failed}
    for place, offset in sorted(failed.keys() - expected.failed.keys()):
        raise Violation(
            f"{message_text(place, offset)} was counted as failed, and did not fail",
            (place, {offset}),
        )
    for (place, offset), count in expected.failed.items():
        failure = failed.get((place, offset))
        about = (place, {offset})
        if failure is None:
            raise Violation(f"{message_text(place, offset)} failed, and was not counted", about)
        if failure.failures != count.failures:
            raise Violation(
                f"{message_text(place, offset)} failed {count.failures} times, "
                f"and was counted as {failure.failures}",
                about,
            )
        not_before_ns = max(failure.not_before_ns, event.at_ns)
        if not_before_ns != count.not_before_ns:
            raise Violation(
                f"{message_text(place, offset)} may come again at {seconds(count.not_before_ns)}, "
                f"and was held until {seconds(not_before_ns)}",
                about,
            )
        if failure.first_delivery_ns != count.first_delivery_ns:
            raise Violation(
                f"{message_text(place, offset)} was first delivered at "
                f"{seconds(count.first_delivery_ns)}, and was recorded as "
                f"{seconds(failure.first_delivery_ns)}",
                about,
            )


def _compare_late(told: Sequence[Stretch], expected: dict[int, list[Span]]) -> None:
    spans: dict[int, list[Span]] = {}
    for part in told:
        if part.begin < part.end:
            spans.setdefault(part.delivery, []).append((part.begin, part.end))
    for delivery in sorted(spans.keys() | expected.keys()):
        right, answered = _joined(expected.get(delivery, ())), _joined(spans.get(delivery, ()))
        if right != answered:
            raise Violation(
                f"of delivery {delivery} {_spans_text(right)} came too late, "
                f"and {_spans_text(answered)} was told so"
            )


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The same offsets, in as few spans as can be."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _spans_text(spans: Sequence[Span]) -> str:
    if not spans:
        return "nothing"
    return ", ".join(
        "all of it" if end == WHOLE_END else offsets_text(begin, end) for begin, end in spans
    )


def trail(events: Sequence[Event], about: About) -> list[tuple[int, Event]]:
    """The events that concern these messages, with their numbers."""
    place, offsets = about
    deliveries: set[tuple[str, int]] = set()
    consumers: set[tuple[str, int]] = set()
    found: list[tuple[int, Event]] = []
    for number, event in enumerate(events, 1):
        if isinstance(event, Delivered) and event.place == place and offsets & set(event.offsets):
            deliveries.add((event.group, event.delivery))
            consumers.add((event.group, event.consumer))
            found.append((number, event))
        elif _concerns(event, place, offsets, deliveries, consumers):
            found.append((number, event))
    return found


def _concerns(
    event: Event,
    place: Place,
    offsets: AbstractSet[int],
    deliveries: AbstractSet[tuple[str, int]],
    consumers: AbstractSet[tuple[str, int]],
) -> bool:
    if isinstance(event, Restarted):
        return True
    if isinstance(event, Published):
        span = range(event.base, event.base + len(event.keys))
        return event.place == place and any(offset in span for offset in offsets)
    if isinstance(event, (Stored, Delivered)):
        return False
    named = [*getattr(event, "deliveries", ())]
    named += [part.delivery for part in getattr(event, "parts", ())]
    if any((event.group, delivery) in deliveries for delivery in named):
        return True
    told = event.told_of()
    if any(failed.place == place and failed.offset in offsets for failed in told.failed):
        return True
    if any(
        dead_letter.place == place and dead_letter.offset in offsets
        for dead_letter in told.dead_letters
    ):
        return True
    if (event.group, getattr(event, "consumer", -1)) in consumers and not named:
        return True
    return getattr(event, "place", None) == place and getattr(event, "offset", None) in (
        None,
        *offsets,
    )
