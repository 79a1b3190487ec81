"""The native listener: framed msgpack over TCP, or through a pipe inside the process.

    listener   sockets and TLS            pipe       the same without sockets
        └──────────────┬──────────────────────┘
    listener       all connections: how many, how long they may be silent, draining
    protocol   one connection's bytes: frames in, one or two writes per wake-up out
    session    what is said: requests become the broker's verbs, its answers become frames

The frames are drawn in `formats.frames`, the heads in `formats.wire`.
"""
