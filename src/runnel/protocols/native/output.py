"""The way back to the client, as sessions and subscriptions see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from runnel.formats import wire

Buffer: TypeAlias = bytes | memoryview


class Output(Protocol):
    """Nothing here waits, and nothing fails: after the end of the connection nothing happens any more."""

    @property
    def connection_id(self) -> int:
        """No other connection of this process ever had it."""

    @property
    def peer(self) -> str:
        """Who is at the other end, for diagnostics."""

    def queue(self, head: bytes, tail: Sequence[Buffer] = (), tail_bytes: int = 0) -> None:
        """A frame for the next write; the tail by reference."""

    def send(self, head: bytes, tail: Sequence[Buffer], tail_bytes: int) -> None:
        """The same for what somebody waits for: a small first frame of a wake-up leaves at once."""

    def close(self) -> None:
        """After what is queued has been written."""

    def pause_input(self) -> None:
        """No more frames, please; what has been read already still comes."""

    def resume_input(self) -> None: ...


def say(output: Output, head: wire.Head, tail: Sequence[Buffer] = ()) -> None:
    """Queue a head, and what belongs behind it."""
    tail_bytes = sum(map(len, tail))
    output.queue(wire.encode(head, tail_bytes), tail, tail_bytes)
