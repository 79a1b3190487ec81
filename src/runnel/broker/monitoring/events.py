"""What happens to the broker, told to whoever watches: messages on `!system/events`, and lines for the operator.

A storm of one kind of event is told in part and then summed up: at most a few subjects of each kind in a second, and
each of them once. So nobody drowns, and nothing happens without a trace.
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
# Subjects of one kind told within a window. A warning asks for somebody's attention: more of those are let through.
_TOLD_MAX: Final = 10
_WARNINGS_TOLD_MAX: Final = 100

logger = get_logger("runnel")

# Topic, payload, tags. It must not wait; what it raises as a RunnelError is logged.
Publish = Callable[[str, bytes, Mapping[str, str]], None]


class EventKind(enum.StrEnum):
    """What can happen. The subject is what it happened to."""

    TOPIC_MADE = "topic_made"  # subject: the topic, as for the next two
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
    SUBSCRIPTION_MADE = "subscription_made"  # the subscription, as for all that follow
    SUBSCRIPTION_DELETED = "subscription_deleted"
    MEMBER_ABSENT = "member_absent"
    DEAD_LETTER = "dead_letter"
    DEAD_LETTER_FAILED = "dead_letter_failed"
    WORK_LOST = "work_lost"
    WORK_UNREADABLE = "work_unreadable"
    QUOTA_REACHED = "quota_reached"  # the token


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
    EventKind.RETENTION: (logging.INFO, "retention made room"),
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
        "a member was absent for too long, and is owed nothing any more",
    ),
    EventKind.DEAD_LETTER: (logging.WARNING, "a message failed too often: it is a dead letter now"),
    EventKind.DEAD_LETTER_FAILED: (
        logging.WARNING,
        "a dead letter could not be stored; it is tried again",
    ),
    EventKind.WORK_LOST: (
        logging.WARNING,
        "MESSAGES ARE GONE BEFORE THEY WERE ACKNOWLEDGED",
    ),
    EventKind.WORK_UNREADABLE: (logging.WARNING, "messages cannot be read; it is tried again"),
    EventKind.QUOTA_REACHED: (logging.WARNING, "a token has reached a quota"),
}


class _Window:
    """One second of one kind: who was told of, and how often they came again."""

    __slots__ = ("began_ns", "others", "repeated", "told")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.told: set[str] = set()
        self.repeated = 0  # of subjects that were told of
        self.others = 0  # of subjects that were not


class Events:
    """See the module's first lines. Without `publish` there are only lines for the operator."""

    def __init__(self, clock: Clock, publish: Publish | None = None) -> None:
        self._clock = clock
        self._publish = publish
        self._windows: dict[EventKind, _Window] = {}
        self.on_flush: Final[list[Callable[[], None]]] = []
        self.counts: Final[dict[EventKind, int]] = dict.fromkeys(EventKind, 0)  # told or held back

    def tell(self, kind: EventKind, subject: str, /, **fields: object) -> None:
        """Something happened. Never waits, never raises for reasons that lie with the publishing.

        `fields` are what can be written as JSON, besides `kind`, `subject` and `time_ns`.
        """
        self.counts[kind] += 1
        now_ns = self._clock.monotonic_ns()
        window = self._windows.get(kind)
        if window is None or now_ns - window.began_ns >= _WINDOW_NS:
            if window is not None:
                self._sum_up(kind, window)
            window = self._windows[kind] = _Window(now_ns)
        level, _ = _LINES[kind]
        if subject in window.told:
            window.repeated += 1
        elif len(window.told) >= (_TOLD_MAX if level < logging.WARNING else _WARNINGS_TOLD_MAX):
            window.others += 1
        else:
            # Before publishing, which may make a topic and so come back here.
            window.told.add(subject)
            self._tell(kind, {"subject": subject, **fields})

    def flush(self) -> None:
        """Sum up what was held back in windows that are over. Housekeeping calls it every second."""
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
            self._tell(
                kind,
                {
                    "subject": "",
                    "suppressed": window.repeated + window.others,
                    "of_other_subjects": window.others,
                },
            )

    def _tell(self, kind: EventKind, fields: Mapping[str, Any]) -> None:
        level, line = _LINES[kind]
        logger.log(level, line, kind=kind.value, **fields)
        if self._publish is None:
            return
        document = {"kind": kind.value, "time_ns": self._clock.time_ns(), **fields}
        try:
            self._publish(EVENTS_TOPIC, msgspec.json.encode(document), {"kind": kind.value})
        except RunnelError as error:
            logger.warning(
                "an event could not be published",
                kind=kind.value,
                subject=fields["subject"],
                error=str(error),
            )
