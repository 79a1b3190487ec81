"""The payload of a bench message, and the check that messages come complete and in order. Pure.

    run 8 │ client 4 │ topic 4 │ number 8 │ padding

`run` distinguishes this load from others on the same topics. `number` counts the messages of one client to one
topic from 0 on, so a reader finds missing messages by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from runnel.formats.message import Message

_HEAD: Final = struct.Struct("!QIIQ")
SIZE_MIN: Final = _HEAD.size


class PayloadMaker:
    """Makes the payloads of one client for one topic, in order."""

    def __init__(self, run: int, client: int, topic: int, size: int) -> None:
        self._prefix = (run, client, topic)
        self._padding = bytes(size - SIZE_MIN)
        self.made = 0

    def next(self) -> bytes:
        payload = _HEAD.pack(*self._prefix, self.made) + self._padding
        self.made += 1
        return payload


class RunCheck:
    """Checks the messages of a run that one subscriber receives."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._next: dict[tuple[int, int], int] = {}
        self.received = 0
        self.bytes = 0
        self.disordered = 0  # came after a later message of the same client and topic, or twice
        self.foreign = 0  # of other publishers

    def take(self, messages: Iterable[Message]) -> list[int]:
        """Check messages; return the event times of those that belong to the run."""
        event_times: list[int] = []
        for message in messages:
            payload = message.payload
            if len(payload) < SIZE_MIN:
                self.foreign += 1
                continue
            run, client, topic, number = _HEAD.unpack_from(payload)
            if run != self._run:
                self.foreign += 1
                continue
            source = (client, topic)
            if number >= self._next.get(source, 0):
                self._next[source] = number + 1
                self.received += 1
            else:
                self.disordered += 1
            self.bytes += len(payload)
            event_times.append(message.event_time_ns)
        return event_times
