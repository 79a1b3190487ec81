"""The message: one row of a batch, as an immutable and light object."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

NO_TAGS: Final[Mapping[str, str]] = MappingProxyType({})

_SHOWN_BYTES_MAX = 32


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message. Times are nanoseconds since 1970 UTC; 0 means not set (yet).

    `tags` is shared by all messages of a batch that have the same tags, so it cannot be changed.
    """

    # gc=False: a message refers to bytes, text, numbers and such a mapping, never to itself.

    topic: str
    payload: bytes  # opaque, may be empty
    key: bytes | None = None  # messages of one key stay in order
    tags: Mapping[str, str] = NO_TAGS
    event_time_ns: int = 0  # when it happened, as its publisher says
    transmit_time_ns: int = 0  # when the client sent it
    receive_time_ns: int = 0  # when the broker received it
    partition: int = 0
    offset: int = 0  # 1, 2, 3 … in its partition; 0: not stored yet
    uid: bytes | None = None  # a KSUID, 20 bytes
    partition_key: bytes | None = None  # what chose the partition, if it was not the key

    @property
    def size(self) -> int:
        """Bytes of the payload."""
        return len(self.payload)

    def __reduce__(self) -> tuple[type[Message], tuple[object, ...]]:
        # A read-only mapping cannot be pickled: a plain copy is sent instead.
        fields = msgspec.structs.asdict(self) | {"tags": dict(self.tags)}
        return (Message, tuple(fields.values()))

    def __repr__(self) -> str:
        where = f"{self.topic}[{self.partition}]@{self.offset}" if self.offset else self.topic
        parts = [where, _shown(self.payload)]
        if self.key is not None:
            parts.append(f"key={_shown(self.key)}")
        if self.tags:
            parts.append(f"tags={dict(self.tags)}")
        return f"<Message {' '.join(parts)}>"


def _shown(data: bytes) -> str:
    if len(data) <= _SHOWN_BYTES_MAX:
        return repr(data)
    return f"{data[:_SHOWN_BYTES_MAX]!r}… ({len(data)} bytes)"
