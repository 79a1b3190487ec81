"""Events: published, logged, and never too many."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from runnel.broker.monitoring.events import _LINES, EVENTS_TOPIC, EventKind, Events
from runnel.errors import BusyError
from tests.broker.fake_publisher import FakePublisher
from tests.fakes.clock import VirtualClock

SECOND_NS = 1_000_000_000


class Told:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.published = FakePublisher()
        self.events = Events(self.clock, self.published.publish)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.DEBUG, "runnel")
    return Lines(caplog)


class Lines:
    """What was logged, as level, line and fields in one."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __call__(self) -> list[dict[str, Any]]:
        return [
            {"level": record.levelno, "event": vars(record)["event"], **vars(record)["fields"]}
            for record in self._caplog.records
        ]


def test_an_event_is_a_message_with_its_kind_as_a_tag(told: Told) -> None:
    told.events.emit(EventKind.TOPIC_MADE, "a/b", journal="main", partitions=4)
    assert told.published.seen == [
        (
            EVENTS_TOPIC,
            {
                "kind": "topic_made",
                "time_ns": told.clock.time_ns(),
                "subject": "a/b",
                "journal": "main",
                "partitions": 4,
            },
            {"kind": "topic_made"},
        )
    ]


def test_every_kind_has_a_level_and_a_line() -> None:
    assert set(_LINES) == set(EventKind)


@pytest.mark.parametrize(
    "kind",
    [
        EventKind.SLOW_READER,
        EventKind.PIN_PASSED,
        EventKind.SHARD_READ_ONLY,
        EventKind.DAMAGE,
        EventKind.RECOVERED,
    ],
)
def test_what_needs_attention_is_a_warning(told: Told, kind: EventKind, lines: Lines) -> None:
    told.events.emit(kind, "subject", detail=7)
    (line,) = lines()
    assert (line["level"], line["kind"], line["subject"], line["detail"]) == (
        logging.WARNING,
        kind.value,
        "subject",
        7,
    )


def test_passing_a_pin_is_reported_loudly(told: Told, lines: Lines) -> None:
    told.events.emit(EventKind.PIN_PASSED, "spark-billing", messages_lost=12)
    (line,) = lines()
    assert line["event"].startswith("MESSAGES ARE GONE")
    assert line["subject"] == "spark-billing"
    assert line["messages_lost"] == 12


def test_the_same_subject_is_reported_once_a_second_and_the_rest_is_counted(told: Told) -> None:
    for _ in range(100):
        told.events.emit(EventKind.SLOW_READER, "peer")
        told.clock.advance(SECOND_NS // 100)
    assert len(told.published.seen) == 1
    told.events.emit(EventKind.SLOW_READER, "peer")
    first, summed_up, again = told.published.events("slow_reader")
    assert (first["subject"], again["subject"]) == ("peer", "peer")
    assert (summed_up["suppressed"], summed_up["of_other_subjects"]) == (99, 0)


def test_a_storm_of_subjects_is_reported_in_part_and_summed_up_when_it_is_over(
    told: Told, lines: Lines
) -> None:
    for number in range(10_000):
        told.events.emit(EventKind.TOPIC_MADE, f"topic/{number}")
    assert len(lines()) == 10
    told.events.flush()
    assert len(told.published.seen) == 10
    told.clock.advance(SECOND_NS)
    told.events.flush()
    told.events.flush()
    assert len(told.published.seen) == 11
    assert told.published.seen[-1][1]["suppressed"] == 9990
    assert told.published.seen[-1][1]["of_other_subjects"] == 9990


def test_kinds_do_not_hold_each_other_back(told: Told) -> None:
    for number in range(1000):
        told.events.emit(EventKind.TOPIC_MADE, f"topic/{number}")
    for number in range(100):
        told.events.emit(EventKind.PIN_PASSED, f"cursor-{number}")
    assert len(told.published.events("pin_passed")) == 100


def test_failing_to_publish_does_not_fail_whoever_tells(told: Told, lines: Lines) -> None:
    told.published.failure = BusyError("the queue is full")
    told.events.emit(EventKind.TOPIC_DELETED, "a")
    assert [line["event"] for line in lines()] == [
        "topic deleted",
        "an event could not be published",
    ]
    assert lines()[1]["error"] == "the queue is full"


def test_publishing_that_makes_a_topic_comes_to_an_end() -> None:
    clock, published = VirtualClock(), FakePublisher()

    def publish(topic: str, payload: bytes, tags: object) -> None:
        events.emit(EventKind.TOPIC_MADE, topic)
        published.publish(topic, payload)

    events = Events(clock, publish)
    events.emit(EventKind.TOPIC_MADE, "a")
    assert [document["subject"] for _, document, _ in published.seen] == [EVENTS_TOPIC, "a"]


def test_without_anybody_to_publish_for_there_are_lines(lines: Lines) -> None:
    Events(VirtualClock()).emit(EventKind.DAMAGE, "file:7: checksum")
    assert lines()[0]["subject"] == "file:7: checksum"
