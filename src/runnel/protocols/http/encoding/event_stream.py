"""Server-sent events as bytes: https://html.spec.whatwg.org/multipage/server-sent-events.html.

An event is a few lines and an empty one. Everything in it is JSON, an id of ours or a number: no line can end early.
"""

from __future__ import annotations

from typing import Final

CONTENT_TYPE: Final = "text/event-stream"
HEARTBEAT: Final = b":\n\n"
"""A comment: readers pass it over, and a connection that is dead is found by it."""

MESSAGE: Final = "message"
GAP: Final = "gap"
CAUGHT_UP: Final = "caught_up"
CLOSING: Final = "closing"
ENDED: Final = "ended"


def preamble(retry_ms: int, event_id: str | None) -> bytes:
    """What comes first: how soon to come again after a loss, and the place to go on from if nothing else comes."""
    place = "" if event_id is None else f"id: {event_id}\n"
    return f"retry: {retry_ms}\n{place}\n".encode()


def place(event_id: str | None) -> bytes:
    """Without data: readers hear nothing of it, and go on from there."""
    return b"" if event_id is None else b"id: %b\n\n" % event_id.encode()


def event(kind: str, event_id: str | None, data: bytes) -> bytes:
    """One event. Without an id a reader goes on from the id before."""
    if event_id is None:
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id.encode(), kind.encode(), data)


def message_event(event_id: str | None, data: bytes) -> bytes:
    """The same for a message. Hot: once a message."""
    if event_id is None:
        return b"event: message\ndata: %b\n\n" % data
    return b"id: %b\nevent: message\ndata: %b\n\n" % (event_id.encode(), data)
