"""The broker's events, as messages on `!system/events` and as log lines.

Many events of one kind are published in part, and the rest is counted: in a second, a few subjects of each kind at
most, and each subject once. So events stay readable, and none happens without a trace.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from runnel.errors import RunnelError
from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger

EVENTS_TOPIC: Final = "!system/events"

_WINDOW_NS: Final = 1_000_000_000
# Subjects of one kind that are published within a window. Warnings need attention, so more of them are published.
_SUBJECTS_MAX: Final = 10
_WARNING_SUBJECTS_MAX: Final = 100

logger = get_logger("runnel")

# Topic, payload, tags. It must not wait; a RunnelError is logged.
Publish = Callable[[str, bytes, Mapping[str, str]], None]


class EventKind(enum.StrEnum):
    """The kind of an event. The subject is the thing that the event is about."""

    TOPIC_MADE = "topic_made"  # the subject is the topic, as for the next two
    TOPIC_DELETED = "topic_deleted"
    TOPIC_PURGED = "topic_purged"
    SLOW_READER = "slow_reader"  # the connection's peer and the subscription
    READER_CAUGHT_UP = "reader_caught_up"
    RECOVERED = "recovered"  # the log, as "disk"
    POLICY_DIFFERS = "policy_differs"  # the topic
    SEGMENT_ROTATED = "segment_rotated"  # the shard, as "main/0"
    RETENTION = "retention"  # the shard, or the log
    RETENTION_FAILED = "retention_failed"
    PIN_PASSED = "pin_passed"  # the cursor
    DAMAGE = "damage"  # the place
    SHARD_READ_ONLY = "shard_read_only"  # the shard
    SHARD_REOPENED = "shard_reopened"
    SHARD_REOPEN_FAILED = "shard_reopen_failed"
    SUBSCRIPTION_MADE = "subscription_made"  # the subscription, as for the next six
    SUBSCRIPTION_DELETED = "subscription_deleted"
    MEMBER_ABSENT = "member_absent"
    DEAD_LETTER = "dead_letter"
    DEAD_LETTER_FAILED = "dead_letter_failed"
    WORK_LOST = "work_lost"
    WORK_UNREADABLE = "work_unreadable"
    QUOTA_REACHED = "quota_reached"  # the token
    SHARD_WANTED = "shard_wanted"  # the shard, as for the next three
    SHARD_TAKEN = "shard_taken"
    SHARD_NOT_TAKEN = "shard_not_taken"
    SHARD_GIVEN_UP = "shard_given_up"
    NODE_FENCED = "node_fenced"  # the node, as for the next one
    NODE_RESTARTED = "node_restarted"


_LINES: Final[Mapping[EventKind, tuple[int, str]]] = {
    EventKind.TOPIC_MADE: (logging.DEBUG, "topic made"),
    # Debug, as for other changes that clients ask for: the audit trail has a line that names the token.
    EventKind.TOPIC_DELETED: (logging.DEBUG, "topic deleted"),
    EventKind.TOPIC_PURGED: (logging.DEBUG, "topic purged"),
    EventKind.SLOW_READER: (logging.WARNING, "a reader cannot keep up"),
    EventKind.READER_CAUGHT_UP: (logging.INFO, "a reader has caught up"),
    EventKind.RECOVERED: (logging.WARNING, "recovered after an unclean end"),
    EventKind.POLICY_DIFFERS: (logging.WARNING, "a topic differs from what its rule says now"),
    EventKind.SEGMENT_ROTATED: (logging.DEBUG, "a new segment was begun"),
    EventKind.RETENTION: (logging.INFO, "retention removed messages"),
    EventKind.RETENTION_FAILED: (logging.WARNING, "retention failed; the next round tries again"),
    EventKind.PIN_PASSED: (
        logging.WARNING,
        "MESSAGES ARE GONE BEFORE THEIR READER READ THEM: a cursor held back more than its pin allows",
    ),
    EventKind.DAMAGE: (logging.WARNING, "stored bytes are damaged"),
    EventKind.SHARD_READ_ONLY: (
        logging.WARNING,
        "a shard takes no more messages since a sync failed",
    ),
    EventKind.SHARD_REOPENED: (logging.WARNING, "a shard takes messages again"),
    EventKind.SHARD_REOPEN_FAILED: (logging.WARNING, "a shard could not be reopened"),
    EventKind.SUBSCRIPTION_MADE: (logging.INFO, "subscription made"),
    EventKind.SUBSCRIPTION_DELETED: (logging.DEBUG, "subscription deleted"),
    EventKind.MEMBER_ABSENT: (
        logging.WARNING,
        "a member was absent for too long: its messages are no longer kept for it",
    ),
    EventKind.DEAD_LETTER: (logging.WARNING, "a message failed too often: it is a dead letter now"),
    EventKind.DEAD_LETTER_FAILED: (
        logging.WARNING,
        "a dead letter could not be stored; the broker tries again",
    ),
    EventKind.WORK_LOST: (
        logging.WARNING,
        "MESSAGES ARE GONE BEFORE THEY WERE ACKNOWLEDGED",
    ),
    EventKind.WORK_UNREADABLE: (logging.WARNING, "messages cannot be read; the broker tries again"),
    EventKind.QUOTA_REACHED: (logging.WARNING, "a token has reached a quota"),
    EventKind.SHARD_WANTED: (logging.INFO, "a shard should move to another node"),
    EventKind.SHARD_TAKEN: (logging.INFO, "this node serves a shard now"),
    EventKind.SHARD_NOT_TAKEN: (
        logging.WARNING,
        "a shard that this node should serve could not be taken; it tries again",
    ),
    EventKind.SHARD_GIVEN_UP: (logging.INFO, "this node has given up a shard"),
    EventKind.NODE_FENCED: (
        logging.ERROR,
        "this node was declared dead by another, and serves nothing any more",
    ),
    EventKind.NODE_RESTARTED: (
        logging.WARNING,
        "the process of this node has ended, and was started again",
    ),
}


class _Window:
    """One second of one kind: the subjects that were published, and how many events were suppressed."""

    __slots__ = ("began_ns", "others", "repeated", "subjects")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.subjects: set[str] = set()
        self.repeated = 0  # suppressed events of these subjects
        self.others = 0  # suppressed events of other subjects


class Events:
    """Publishes and logs events. Without `publish` it only logs."""

    def __init__(self, clock: Clock, publish: Publish | None = None) -> None:
        self._clock = clock
        self._publish = publish
        self.node = ""
        """The name of this node, if there are several: it stands in each event."""
        self._windows: dict[EventKind, _Window] = {}
        self.on_flush: Final[list[Callable[[], None]]] = []
        self.counts: Final[dict[EventKind, int]] = dict.fromkeys(
            EventKind, 0
        )  # published or suppressed

    def emit(self, kind: EventKind, subject: str, /, **fields: object) -> None:
        """Publish and log an event. It never waits, and a failed publish raises nothing.

        `fields` must be encodable as JSON; `kind`, `subject` and `time_ns` are added.
        """
        self.counts[kind] += 1
        now_ns = self._clock.monotonic_ns()
        window = self._windows.get(kind)
        if window is None or now_ns - window.began_ns >= _WINDOW_NS:
            if window is not None:
                self._sum_up(kind, window)
            window = self._windows[kind] = _Window(now_ns)
        level, _ = _LINES[kind]
        if subject in window.subjects:
            window.repeated += 1
        elif len(window.subjects) >= (
            _SUBJECTS_MAX if level < logging.WARNING else _WARNING_SUBJECTS_MAX
        ):
            window.others += 1
        else:
            # Before publishing, which may create a topic and so emit another event.
            window.subjects.add(subject)
            self._write(kind, {"subject": subject, **fields})

    def flush(self) -> None:
        """Publish the counts of suppressed events of windows that are over. Log maintenance calls it every second."""
        now_ns = self._clock.monotonic_ns()
        over = [
            kind for kind, window in self._windows.items() if now_ns - window.began_ns >= _WINDOW_NS
        ]
        for kind in over:
            self._sum_up(kind, self._windows.pop(kind))
        for flush in self.on_flush:
            flush()

    def _sum_up(self, kind: EventKind, window: _Window) -> None:
        if window.repeated or window.others:
            self._write(
                kind,
                {
                    "subject": "",
                    "suppressed": window.repeated + window.others,
                    "of_other_subjects": window.others,
                },
            )

    def _write(self, kind: EventKind, fields: Mapping[str, Any]) -> None:
        level, line = _LINES[kind]
        logger.log(level, line, kind=kind.value, **fields)
        if self._publish is None:
            return
        document = {"kind": kind.value, "time_ns": self._clock.time_ns(), **fields}
        if self.node:
            document["node"] = self.node
        try:
            self._publish(EVENTS_TOPIC, msgspec.json.encode(document), {"kind": kind.value})
        except RunnelError as error:
            logger.warning(
                "an event could not be published",
                kind=kind.value,
                subject=fields["subject"],
                error=str(error),
            )
