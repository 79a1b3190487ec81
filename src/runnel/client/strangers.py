"""Who answers at the wrong port: Runnel's other doors, and whoever speaks as they do, known by their first bytes."""

from __future__ import annotations

from typing import Final

# Status lines of HTTP/1 begin so.
_HTTP: Final = b"HTTP/"

# HTTP/2, which gRPC is spoken in, begins with a frame of settings:
#
#     0   3   length      big-endian
#     3   1   type        4
#     4   1   flags       0
#     5   4   stream      0
_HTTP2_TYPE_AT: Final = 3
_HTTP2_SETTINGS: Final = b"\x04\x00\x00\x00\x00\x00"


def stranger_of(beginning: memoryview) -> str | None:
    """What kind of door it is whose answer begins so; None: not one that is known.

    Neither can begin a frame of ours: the one would be too long, the other has no head.
    """
    first = bytes(beginning[: _HTTP2_TYPE_AT + len(_HTTP2_SETTINGS)])
    if first.startswith(_HTTP):
        return "an HTTP door"
    if first[_HTTP2_TYPE_AT:] == _HTTP2_SETTINGS:
        return "a gRPC door"
    return None
