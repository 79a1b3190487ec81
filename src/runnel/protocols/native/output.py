"""The output of a connection, as its session, subscriptions and consumers see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from runnel.formats import wire

Buffer: TypeAlias = bytes | memoryview


class Output(Protocol):
    """Sends frames to the client. No method waits or fails; after the end of the connection they do nothing."""

    @property
    def connection_id(self) -> int:
        """Unique among all connections that this process ever had."""

    @property
    def peer(self) -> str:
        """The client's address, for diagnostics."""

    def queue(self, head: bytes, tail: Sequence[Buffer] = (), tail_bytes: int = 0) -> None:
        """Queue a frame for the next write; the tail is kept by reference."""

    def send(self, head: bytes, tail: Sequence[Buffer], tail_bytes: int) -> None:
        """Queue a frame that a reader waits for: a small first frame of a wake-up leaves at once."""

    def close(self) -> None:
        """Close the connection after all queued frames are written."""

    def pause_input(self) -> None:
        """Stop reading. Frames that were read already are still delivered."""

    def resume_input(self) -> None: ...


def say(output: Output, head: wire.Head, tail: Sequence[Buffer] = ()) -> None:
    """Encode and queue a head with its tail."""
    tail_bytes = sum(map(len, tail))
    output.queue(wire.encode(head, tail_bytes), tail, tail_bytes)
