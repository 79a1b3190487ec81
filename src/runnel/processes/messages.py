"""What parent and child tell each other: JSON with a length before it, over a pair of sockets."""

from __future__ import annotations

from typing import Final

import msgspec

from runnel.config import LogLevel, Settings
from runnel.errors import MalformedError

# The settings of a thousand rules are far below it.
MESSAGE_BYTES_MAX: Final = 64 * 2**20
LENGTH_BYTES: Final = 4


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """To a child, first of all: everything that it needs to serve. It reads no settings itself."""

    settings: Settings
    number: int
    life: int
    """Counts the processes of this child since its parent began."""
    log_level: LogLevel
    log_format: str
    sockets: dict[str, int]
    """The inherited listening sockets, by listener."""
    grpc_address: str | None
    """`host:port` that all children bind for gRPC; None: no such listener."""
    former_end: str = ""
    """How the process before this one ended; "": in good order, or there was none."""


class NewSettings(msgspec.Struct, frozen=True, tag="settings"):
    """To a child: apply of these settings what can change."""

    settings: Settings


class EndWord(msgspec.Struct, frozen=True, tag="end"):
    """To all children: finish accepted requests and end, or end at once."""

    is_hurried: bool


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """From a child, every second: its event loop runs."""


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """From a child: it is a node of the cluster in this incarnation."""

    incarnation: int
    address: str


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """From a child: its listeners are open."""

    recovered: list[str]


class Reloaded(msgspec.Struct, frozen=True, tag="reloaded"):
    """From a child: it has applied the new settings."""


class StartFailure(msgspec.Struct, frozen=True, tag="failure"):
    """From a child: it ends with this error."""

    code: str
    text: str


ToChild = Launch | NewSettings | EndWord
FromChild = Heartbeat | Joined | Serving | Reloaded | StartFailure

_encoder: Final = msgspec.json.Encoder()
_to_child: Final = msgspec.json.Decoder(ToChild)
_from_child: Final = msgspec.json.Decoder(FromChild)


def encode(message: ToChild | FromChild) -> bytes:
    content = _encoder.encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def length_of(header: bytes) -> int:
    """The length of the message behind this header."""
    length = int.from_bytes(header, "big")
    if length > MESSAGE_BYTES_MAX:
        raise MalformedError("message length", f"{length} is more than {MESSAGE_BYTES_MAX}")
    return length


def decode_to_child(content: bytes) -> ToChild:
    message: ToChild = _to_child.decode(content)
    return message


def decode_from_child(content: bytes) -> FromChild:
    message: FromChild = _from_child.decode(content)
    return message
