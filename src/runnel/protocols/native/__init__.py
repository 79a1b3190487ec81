"""The native listener: framed msgpack over TCP, or through a pipe inside the process. Read `session.py` first.

    listener   sockets and TLS            pipe       the same without sockets
        └──────────────┬──────────────────────┘
    native_server   all connections: their number, time-outs, draining
    protocol        the bytes of one connection: frames in, one or two writes per wake-up out
    session         requests become the broker's verbs, and its answers become frames

`formats.frames` draws the frames, `formats.wire` the heads.
"""

__all__ = ["listener", "native_server"]
