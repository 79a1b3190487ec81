"""Rights times verbs times listeners at a node that owns nothing: all is relayed, with exactly the same rights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from runnel.config import (
    Authentication,
    GrpcSettings,
    HttpSettings,
    LogSettings,
    SecuritySettings,
    Settings,
)
from runnel.security.tokens import TokenFile
from runnel.testing import VirtualClock, open_cluster
from tests.protocols.guarded import EVERYTHING, LISTENER_CLASSES, LISTENERS, Guarded, _ended, _tick
from tests.protocols.test_rights import RIGHTS, SCOPES, STATUS, VERBS, refusal_of, set_the_scene

# About a node of its own, or about the shard main/0, in which nothing lies here.
LEFT_OUT = {
    "fetch_a_shard",
    "set_a_cursor_over_patterns",
    "watch_the_system",
}
# Refused over several nodes.
LEFT_OUT_OVER_HTTP = {"consume_anew", "consume_what_exists"}
RELAYED = [each for each in VERBS if each.name not in LEFT_OUT]


@asynccontextmanager
async def open_relaying(directory: Path, listener: str) -> AsyncIterator[tuple[Guarded, Guarded]]:
    """Two nodes that ask for tokens: one that owns nothing, with this listener, and one that owns everything."""
    tokens = TokenFile(directory / "tokens.json")
    settings = Settings(
        log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0),
        http=HttpSettings(listen="127.0.0.1:0"),
        grpc=GrpcSettings(listen="127.0.0.1:0"),
        security=SecuritySettings(
            authentication=Authentication.TOKEN, tokens_file=str(directory / "tokens.json")
        ),
    )
    clock = VirtualClock()
    async with open_cluster(2, settings, clock=clock) as cluster, AsyncExitStack() as opened:
        await cluster.drain("node-1")
        relaying, owning = cluster.nodes
        addresses = {"native": relaying.url}
        if listener != "native":
            broker = relaying.broker
            front = await LISTENER_CLASSES[listener].open(
                broker._core, broker._authenticator, settings, broker.make_access
            )
            opened.push_async_callback(front.close)
            addresses[listener] = front.address
        quotas = relaying.broker._core.quotas
        guarded = Guarded(tokens, clock, addresses, quotas)
        owner = Guarded(tokens, clock, {"native": owning.url}, quotas)
        ticking = asyncio.get_running_loop().create_task(_tick(clock))
        opened.push_async_callback(_ended, ticking)
        opened.push_async_callback(guarded.close)
        opened.push_async_callback(owner.close)
        yield guarded, owner
        assert relaying.shards() == []


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("pattern", ["open/*", "closed/*", "*", "!*"])
@pytest.mark.parametrize("right", RIGHTS)
def test_relayed_request_has_exactly_the_rights_of_its_caller(
    listener: str, right: str, pattern: str, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), open_relaying(tmp_path, listener) as (guarded, owner):
            root = owner.token(*EVERYTHING, name="root")
            async with owner.connecting("native", root) as bus:
                await set_the_scene(bus)
            bus = await guarded.client(listener, f"{right}:{pattern}")
            wrong = []
            for each in RELAYED:
                if listener not in each.listeners:
                    continue
                if listener == "http" and each.name in LEFT_OUT_OVER_HTTP:
                    continue
                refusal = await refusal_of(each.act(bus))
                status = getattr(refusal, "status", STATUS.get(listener))
                assert status == STATUS.get(listener), each.name
                if (refusal is None) != each.is_allowed(right, pattern):
                    wrong.append(f"{each.name}: {'allowed' if refusal is None else 'refused'}")
            assert not wrong

    assert pattern in SCOPES
    asyncio.run(scenario())
