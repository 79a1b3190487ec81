"""Server-sent events as bytes: https://html.spec.whatwg.org/multipage/server-sent-events.html.

An event is a few lines and an empty one. Its values are JSON, ids of ours or numbers, so none contains a line end.
"""

from __future__ import annotations

from typing import Final

CONTENT_TYPE: Final = "text/event-stream"
HEARTBEAT: Final = b":\n\n"
"""A comment, which readers ignore. Sending it reveals a dead connection."""

MESSAGE: Final = "message"
GAP: Final = "gap"
CAUGHT_UP: Final = "caught_up"
CLOSING: Final = "closing"
ENDED: Final = "ended"


def preamble(retry_ms: int, event_id: str | None) -> bytes:
    """The beginning of a stream: when to reconnect after a loss, and the id to resume from if no event follows."""
    id_line = "" if event_id is None else f"id: {event_id}\n"
    return f"retry: {retry_ms}\n{id_line}\n".encode()


def position_event(event_id: str | None) -> bytes:
    """An id without data: programs get no event, but the stream resumes from there."""
    return b"" if event_id is None else b"id: %b\n\n" % event_id.encode()


def event(kind: str, event_id: str | None, data: bytes) -> bytes:
    """One event. Without an id, a reader resumes from the previous id."""
    if event_id is None:
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id.encode(), kind.encode(), data)


def message_event(event_id: str | None, data: bytes) -> bytes:
    """An event of kind `message`. Hot: called once per message."""
    if event_id is None:
        return b"event: message\ndata: %b\n\n" % data
    return b"id: %b\nevent: message\ndata: %b\n\n" % (event_id.encode(), data)
