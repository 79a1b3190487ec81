"""Runnel with its listeners open, with or without tokens, and what is asked of it around a run.

Topics are on disk, and a publisher is answered once its message is stored: the defaults. Those whose names begin with
`live-` are kept nowhere, so that there is nothing to sync.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from bench.systems.system import free_port, scratch, serving
from runnel.client import connect_blocking
from runnel.security.rights import Grant
from runnel.security.tokens import TokenFile, new_token

_CONFIG = """
data = "{data}"

[native]
listen = "{native}"

[http]
listen = "{http}"

[grpc]
listen = "{grpc}"

[security]
authentication = "{authentication}"

[[topics]]
match = "live-*"
keep = "none"
"""
# As an application's token would be: what it needs, by a few patterns each.
_ALLOWED = (
    "publish:work-*",
    "publish:live-*",
    "publish:wide-*",
    "consume:work-*",
    "read:work-*",
)


class ServedListeners(msgspec.Struct, frozen=True):
    """A running broker: where its listeners are, and the token that opens them."""

    pid: int
    native: str
    http: str
    grpc: str
    token: str | None = None


@contextmanager
def serve(
    *, http: bool = False, grpc: bool = False, has_tokens: bool = False
) -> Iterator[ServedListeners]:
    """The native listener is always open."""
    with scratch() as directory:
        # In the order in which they are opened: when the last is ready, all are.
        opened = {"native": free_port()}
        if http:
            opened["http"] = free_port()
        if grpc:
            opened["grpc"] = free_port()
        addresses = dict.fromkeys(("native", "http", "grpc"), "none")
        addresses |= {name: f"127.0.0.1:{port}" for name, port in opened.items()}
        data = directory / "data"
        text = None
        if has_tokens:
            token, text = new_token("bench", [Grant.parse(each) for each in _ALLOWED], now_ns=1)
            with TokenFile(data / "tokens.json").changing() as tokens:
                tokens.append(token)
        config = directory / "runnel.toml"
        authentication = "token" if has_tokens else "none"
        config.write_text(_CONFIG.format(data=data, authentication=authentication, **addresses))
        command = [sys.executable, "-m", "runnel", "serve", "--config", str(config)]
        with serving(command, [*opened.values()][-1], "runnel", directory) as served:
            yield ServedListeners(served.pid, token=text, **addresses)


def subscribe(listeners: ServedListeners, name: str) -> None:
    """Make the subscription of a run, before it begins."""
    with connect_blocking(f"runnel://{listeners.native}", token=listeners.token) as bus:
        bus.make_subscription(name, f"work-{name}", mode="shared")


def audit(listeners: ServedListeners, name: str, published: int) -> str:
    """Whether the broker knows of every message and acknowledgement of a run; if not, how it differs."""
    with connect_blocking(f"runnel://{listeners.native}", token=listeners.token) as bus:
        stored = bus.topic(f"work-{name}").messages
        state = bus.subscription(name)
    problems = []
    if stored != published:
        problems.append(f"{stored:,} of {published:,} stored")
    if backlog := sum(member.backlog for member in state.members):
        problems.append(f"{backlog:,} not acknowledged")
    if state.redelivered:
        problems.append(f"{state.redelivered:,} delivered again")
    return " and ".join(problems)
