"""Metrics and statistics at any node: those of all, also while one of them does not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from runnel.config import Authentication, SecuritySettings
from runnel.formats import wire
from runnel.formats.metrics_report import ExposedMetric, decode_metrics
from runnel.relay import monitoring
from runnel.security.rights import Grant
from runnel.security.tokens import TokenFile, new_token
from runnel.testing import open_cluster
from runnel.testing.cluster import EmbeddedCluster, EmbeddedNode
from tests.protocols.http.busy_broker import OPENMETRICS, Scraped, scrape
from tests.relay.stage import SETTINGS, http_of, scenario

NAMES = [f"t/{number:02}" for number in range(20)]
NODES = {"node-1", "node-2", "node-3"}


async def client_of(node: EmbeddedNode, opened: AsyncExitStack) -> httpx.AsyncClient:
    url = await http_of(node, opened)
    return await opened.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))


def by_node(scraped: Scraped, name: str) -> dict[str, float]:
    return {
        sample.labels["node"]: sample.value
        for family in scraped.families
        for sample in family.samples
        if sample.name == name
    }


async def publish_some(cluster: EmbeddedCluster) -> None:
    async with cluster.connect() as bus:
        for name in NAMES:
            await bus.publish(name, b"x")


class Held:
    """Holds back a node's metrics until the test lets it answer."""

    def __init__(self, node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        monitor = node.broker._core.monitor
        self._read = monitor.read_metrics
        monkeypatch.setattr(monitor, "read_metrics", self._wait)

    async def _wait(self) -> Sequence[ExposedMetric]:
        self.asked.set()
        await self.may_answer.wait()
        return await self._read()


# --- Metrics ---


@scenario
async def test_every_node_answers_for_all(cluster: EmbeddedCluster) -> None:
    await publish_some(cluster)
    async with AsyncExitStack() as opened:
        counts: list[dict[str, float]] = []
        for node in cluster.nodes:
            client = await client_of(node, opened)
            for accept in ("", OPENMETRICS):
                scraped = await scrape(client, accept=accept)
                assert by_node(scraped, "runnel_node_up") == dict.fromkeys(NODES, 1)
                assert {row["node"] for row in scraped.labels("runnel_build_info")} == NODES
                counts.append(by_node(scraped, "runnel_messages_in_total"))
                for family in scraped.families:
                    for sample in family.samples:
                        assert sample.labels["node"] in NODES, sample
        assert all(count == counts[0] for count in counts)
        assert sum(counts[0].values()) == len(NAMES)
        served = {node.name: bool(node.shards()) for node in cluster.nodes}
        assert {name: count > 0 for name, count in counts[0].items()} == served


@scenario
async def test_killed_node_is_down_until_it_lives_again(cluster: EmbeddedCluster) -> None:
    await publish_some(cluster)
    async with AsyncExitStack() as opened:
        client = await client_of(cluster.nodes[0], opened)
        await cluster.kill("node-2")
        scraped = await scrape(client)
        assert by_node(scraped, "runnel_node_up") == {"node-1": 1, "node-2": 0, "node-3": 1}
        assert set(by_node(scraped, "runnel_messages_in_total")) == {"node-1", "node-3"}
        await cluster.start("node-2")
        await cluster.until(lambda: len(cluster.nodes[0].node.nodes) == 3)
        assert by_node(await scrape(client), "runnel_node_up") == dict.fromkeys(NODES, 1)


@scenario
async def test_lag_of_a_cursor_is_counted_where_its_shard_is_served_now(
    cluster: EmbeddedCluster,
) -> None:
    async with AsyncExitStack() as opened:
        client = await client_of(cluster.nodes[0], opened)
        async with cluster.connect() as bus:
            for _ in range(5):
                await bus.publish("t/00", b"x")
            await bus.set_cursor("pipeline", {"t/00": 3})
        for owner in ("node-2", "node-3", "node-1"):
            await cluster.move(cluster.shard_of("t/00"), owner)
            for node in cluster.nodes:  # its last reading may be from before the move
                node.broker._core.monitor._cursors.forget()
            lags = by_node(await scrape(client), "runnel_cursor_lag_messages")
            assert lags == dict.fromkeys(NODES, 0) | {owner: 3}


def test_node_that_does_not_answer_in_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    @scenario
    async def run(cluster: EmbeddedCluster) -> None:
        async with AsyncExitStack() as opened:
            client = await client_of(cluster.nodes[0], opened)
            await scrape(client)  # there are links from now on
            held = Held(cluster.nodes[1], monkeypatch)
            monkeypatch.setattr(monitoring, "NODE_SECONDS_MAX", 1.0)
            scraped = await scrape(client)
            assert held.asked.is_set()
            assert by_node(scraped, "runnel_node_up")["node-2"] == 0
            assert "node-2" not in by_node(scraped, "runnel_messages_in_total")
            held.may_answer.set()
            monkeypatch.setattr(monitoring, "NODE_SECONDS_MAX", 10.0)
            scraped = await scrape(client)
            assert by_node(scraped, "runnel_node_up") == dict.fromkeys(NODES, 1)

    run()


def test_node_that_dies_while_it_is_asked_is_left_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitoring, "NODE_SECONDS_MAX", 600.0)

    @scenario
    async def run(cluster: EmbeddedCluster) -> None:
        async with AsyncExitStack() as opened:
            client = await client_of(cluster.nodes[0], opened)
            held = Held(cluster.nodes[1], monkeypatch)
            scraping = asyncio.create_task(scrape(client))
            await held.asked.wait()
            await cluster.kill("node-2")
            assert by_node(await scraping, "runnel_node_up")["node-2"] == 0

    run()


def test_nodes_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "NODE_SECONDS_MAX", 600.0)

    @scenario
    async def run(cluster: EmbeddedCluster) -> None:
        async with AsyncExitStack() as opened:
            client = await client_of(cluster.nodes[0], opened)
            held = [Held(node, monkeypatch) for node in cluster.nodes]
            scraping = asyncio.create_task(scrape(client))
            for each in held:  # none answers before all were asked
                await each.asked.wait()
            for each in held:
                each.may_answer.set()
            assert by_node(await scraping, "runnel_node_up") == dict.fromkeys(NODES, 1)

    run()


@scenario
async def test_report_of_the_native_protocol_is_about_the_node_that_answers(
    cluster: EmbeddedCluster,
) -> None:
    await publish_some(cluster)
    total = 0.0
    for node in cluster.nodes:
        async with node.connect() as bus:
            _, tail = await bus._ask(wire.MetricsReport, wire.MetricsHead, "asking for metrics")
        metrics = {each.name: each for each in decode_metrics(tail)}
        [(_, value)] = metrics["runnel_messages_in"].rows
        assert value == node.broker._core.metrics.counters.messages_in
        total += value
    assert total == len(NAMES)


def test_reading_needs_the_right_at_every_node_and_uses_the_callers_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    watcher, watcher_text = new_token(
        "prometheus", [Grant.parse("read:!system/metrics/*")], now_ns=1
    )
    reader, reader_text = new_token("sensors", [Grant.parse("read:*")], now_ns=1)
    with TokenFile(file).changing() as tokens:
        tokens += [watcher, reader]
    security = SecuritySettings(authentication=Authentication.TOKEN, tokens_file=str(file))
    settings = msgspec.structs.replace(SETTINGS, security=security)

    async def run() -> None:
        async with (
            asyncio.timeout(60),
            open_cluster(3, settings) as cluster,
            AsyncExitStack() as opened,
        ):
            client = await client_of(cluster.nodes[0], opened)
            for path in ("/metrics", "/v1/statistics"):
                assert (await client.get(path)).status_code == 401
                refused = await client.get(path, headers={"authorization": f"Bearer {reader_text}"})
                assert refused.status_code == 403
            # Nobody was asked on behalf of a caller without the right.
            others = [node.broker._core for node in cluster.nodes[1:]]
            assert all(other.metrics.counters.connections_opened == 0 for other in others)
            client.headers["authorization"] = f"Bearer {watcher_text}"
            scraped = await scrape(client)
            assert by_node(scraped, "runnel_node_up") == dict.fromkeys(NODES, 1)
            for other in others:
                rows, _ = await other.connections.page(after=0, limit=0, owner=None)
                assert {row.token for row in rows} == {"prometheus"}

    asyncio.run(run())


# --- Statistics ---


@scenario
async def test_statistics_are_those_of_all_nodes_by_name(cluster: EmbeddedCluster) -> None:
    await publish_some(cluster)
    async with AsyncExitStack() as opened:
        client = await client_of(cluster.nodes[0], opened)

        async def ask() -> dict[str, Any]:
            answer = await client.get("/v1/statistics")
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = json.loads(answer.text)
            return found

        found = await ask()
        nodes = found.pop("nodes")
        assert set(nodes) == NODES
        assert nodes["node-1"] == found
        assert sum(each["totals"]["messages_in"] for each in nodes.values()) == len(NAMES)
        await cluster.kill("node-3")
        nodes = (await ask())["nodes"]
        assert nodes["node-3"] is None
        assert {"node-1", "node-2"} == {name for name, each in nodes.items() if each}
