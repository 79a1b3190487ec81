"""Server-sent events at any node: over all owners, resumed at another node by the id of the last event."""

from __future__ import annotations

from contextlib import AsyncExitStack

import httpx
import msgspec

from runnel.testing.cluster import EmbeddedCluster
from tests.conformance.clients.http_readers import events
from tests.relay.stage import http_of, scenario

NAMES = [f"t/{number:02}" for number in range(12)]


async def read(
    url: str, count: int, after: str | None, **query: str
) -> tuple[list[tuple[str, str]], str | None]:
    """Messages of a new stream, so many, and the id of the last one."""
    found: list[tuple[str, str]] = []
    headers = {} if after is None else {"last-event-id": after}
    async with (
        httpx.AsyncClient(base_url=url, timeout=30) as client,
        client.stream(
            "GET", "/v1/stream", params={"pattern": "t/*", **query}, headers=headers
        ) as answer,
    ):
        assert answer.status_code == 200
        async for event in events(answer.aiter_lines()):
            if event.kind == "message":
                message = msgspec.json.decode(event.data)
                found.append((message["topic"], message["text"]))
                if len(found) == count:
                    return found, event.id
    raise AssertionError(f"the stream ended after {found}")


@scenario
async def test_stream_is_resumed_at_another_node_and_misses_nothing(
    cluster: EmbeddedCluster,
) -> None:
    async with AsyncExitStack() as opened:
        urls = [await http_of(node, opened) for node in cluster.nodes]
        async with cluster.connect() as bus:
            for number in range(5):
                for name in NAMES:
                    await bus.publish(name, b"%d" % number)
            seen: list[tuple[str, str]] = []
            last: str | None = None
            for turn in range(6):
                await cluster.move(cluster.shard_of(NAMES[turn]), cluster.nodes[turn % 3].name)
                found, last = await read(urls[turn % 3], 10, last, start="earliest")
                seen += found
        by_topic: dict[str, list[str]] = {}
        for topic, text in seen:
            by_topic.setdefault(topic, []).append(text)
        assert by_topic == {name: [str(number) for number in range(5)] for name in NAMES}
