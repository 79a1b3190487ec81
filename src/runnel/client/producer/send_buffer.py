"""The send buffer: it checks and collects the messages that `send` takes. Pure; the hottest lines of the client.

A message that is not valid is refused here, before it is part of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final

from runnel.client.producer.batch_builder import MESSAGE_OVERHEAD_BYTES, PendingRows, tags_size
from runnel.errors import ClientFault, MalformedError
from runnel.formats.message import NO_TAGS
from runnel.formats.table import TAGS_MAX, UID_BYTES
from runnel.topics.names import check_topic

_NO_TOPIC: Final = "no topic: give send() one, or the publisher a default"
_TIME_MIN: Final = -(2**63)
_TIME_MAX: Final = 2**63 - 1
_KNOWN_NAMES_MAX: Final = 200_000


class SendBuffer(ABC):
    """Collects messages as rows. A subclass says, in `_make_room`, where the rows go."""

    __slots__ = (
        "_chunk_bytes_max",
        "_chunk_messages",
        "_event_times_ns",
        "_has_topic",
        "_keys",
        "_known_names",
        "_last_tags",
        "_message_bytes",
        "_now_ns",
        "_opened_bytes",
        "_payloads",
        "_room_bytes",
        "_rows",
        "_topic",
        "_topics",
    )

    def __init__(
        self,
        topic: str | None,
        now_ns: Callable[[], int],
        *,
        chunk_messages: int,
        chunk_bytes_max: int,
    ) -> None:
        if topic is not None:
            check_topic(topic)
        self._topic = topic
        self._has_topic = topic is not None
        self._now_ns = now_ns
        self._chunk_messages = chunk_messages
        self._chunk_bytes_max = chunk_bytes_max
        # Stays empty if there is a default topic, so that every other topic takes the longer way.
        self._known_names: set[str] = set()
        self._last_tags: Mapping[str, str] = NO_TAGS
        # The size of a message, lately. At first it is a guess.
        self._message_bytes = 2 * MESSAGE_OVERHEAD_BYTES
        self._room_bytes = self._opened_bytes = 0
        self._begin_rows()

    def _begin_rows(self) -> None:
        self._rows = rows = PendingRows(self._topic)
        self._payloads = rows.payloads
        self._keys = rows.keys
        self._event_times_ns = rows.event_times_ns
        self._topics = rows.topics

    # Options may be given by position: keyword-only ones cost 60 ns more per call.
    def send(
        self,
        payload: bytes,
        topic: str | None = None,
        key: bytes | None = None,
        tags: Mapping[str, str] | None = None,
        event_time_ns: int | None = None,
        partition_key: bytes | None = None,
        uid: bytes | None = None,
    ) -> None:
        """Take a message and return at once. It leaves soon, in a batch with others. Give options by name.

        BusyError: far more has been sent than the buffer holds, without waiting for room.
        """
        if self._room_bytes <= 0 or payload.__class__ is not bytes:
            payload = self._admit(payload)
        if event_time_ns is None:
            event_time_ns = self._now_ns()
        elif event_time_ns.__class__ is not int or not _TIME_MIN <= event_time_ns <= _TIME_MAX:
            raise MalformedError("event_time_ns", f"{event_time_ns!r} is no 64-bit integer")
        # Everything is checked before the first list grows: otherwise the lists would no longer match.
        if tags is not None or partition_key is not None or uid is not None:
            self._set_aside(topic, key, tags, partition_key, uid)
        elif key is not None:
            # Only a key, and a topic that is known: half the time of the longer way (bench/queue.py, "work").
            is_known = self._has_topic if topic is None else topic in self._known_names
            if is_known and key.__class__ is bytes:
                self._keys[len(self._payloads)] = key
                self._room_bytes -= len(key)
            else:
                self._set_aside(topic, key, tags, partition_key, uid)
        if topic is None:
            if self._topic is None:
                raise ClientFault(_NO_TOPIC)
        elif topic in self._known_names:
            self._topics.append(topic)
        else:
            self._name_row(topic)
        self._room_bytes -= len(payload) + MESSAGE_OVERHEAD_BYTES
        self._payloads.append(payload)
        self._event_times_ns.append(event_time_ns)

    def _admit(self, payload: bytes) -> bytes:
        if payload.__class__ is not bytes:
            payload = as_bytes("payload", payload)
        if self._room_bytes <= 0:
            self._make_room()
        return payload

    @abstractmethod
    def _make_room(self) -> None:
        """Called before the first message of a wake-up, and when the buffer is full. Calls `_open`."""

    def _open(self) -> None:
        """Make room for about one batch. Room is counted in bytes, so messages of one size fill whole batches."""
        room_bytes = self._chunk_messages * self._message_bytes
        if room_bytes > self._chunk_bytes_max:
            room_bytes = self._chunk_bytes_max
        self._room_bytes = self._opened_bytes = room_bytes

    def _take(self) -> PendingRows | None:
        """Take the rows that were collected so far, if there are any. The next `send` calls `_make_room`."""
        rows = self._rows
        if not rows.payloads:
            return None
        rows.size = self._opened_bytes - self._room_bytes
        self._message_bytes = -(-rows.size // len(rows.payloads))
        self._room_bytes = 0
        self._begin_rows()
        return rows

    def _name_row(self, topic: str) -> None:
        check_topic(topic)
        if self._topic is None:
            if len(self._known_names) >= _KNOWN_NAMES_MAX:
                self._known_names.clear()
            self._known_names.add(topic)
        else:
            self._rows.name_all()
        self._topics.append(topic)

    def _set_aside(
        self,
        topic: str | None,
        key: bytes | None,
        tags: Mapping[str, str] | None,
        partition_key: bytes | None,
        uid: bytes | None,
    ) -> None:
        """Keep the options that most messages lack, for the row that comes next."""
        if topic is not None:
            check_topic(topic)
        elif self._topic is None:
            raise ClientFault(_NO_TOPIC)
        if key is not None:
            key = as_bytes("key", key)
        if partition_key is not None:
            partition_key = as_bytes("partition_key", partition_key)
        check_uid(uid)
        if tags != self._last_tags:
            check_tags(tags)
            self._last_tags = dict(tags or {})  # a copy: the caller may change its mapping
        rows = self._rows
        row = len(rows.payloads)
        if key is not None:
            rows.keys[row] = key
            self._room_bytes -= len(key)
        if partition_key is not None:
            rows.partition_keys[row] = partition_key
            self._room_bytes -= len(partition_key)
        if tags:
            rows.tags[row] = self._last_tags
            self._room_bytes -= tags_size(self._last_tags)
        if uid is not None:
            rows.uids[row] = uid
            self._room_bytes -= UID_BYTES


def as_bytes(name: str, value: object) -> bytes:
    """The value as bytes that the caller cannot change while they wait."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    advice = '; text needs .encode("utf-8")' if isinstance(value, str) else ""
    raise MalformedError(name, f"must be bytes, not {type(value).__name__}{advice}")


def check_tags(tags: Mapping[str, str] | None) -> None:
    if tags is None:
        return
    if not isinstance(tags, Mapping):
        raise MalformedError("tags", f"{tags!r} is not a mapping of text to text")
    if len(tags) > TAGS_MAX:
        raise MalformedError("tags", f"{len(tags)} tags, at most {TAGS_MAX} are allowed")
    for name, value in tags.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise MalformedError("tags", f"{name!r}: {value!r} must be text on both sides")


def check_uid(uid: bytes | None) -> None:
    if uid is not None and (not isinstance(uid, bytes) or len(uid) != UID_BYTES):
        raise MalformedError("uid", f"must be {UID_BYTES} bytes, not {uid!r:.60}")
