"""REST and gRPC at real processes: whichever of them a request meets, it is answered for all."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from runnel.client import connect
from tests.conformance.clients.grpc_bus import connect_grpc
from tests.server.server_process import SECONDS_MAX, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = [f"orders/{number}" for number in range(24)]


def ask(address: str, method: str, path: str, body: object = None) -> Any:
    """The answer to a request on a connection of its own, which any of the processes may accept."""
    connection = http.client.HTTPConnection(address, timeout=SECONDS_MAX)
    try:
        headers = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, (method, path, answer.status, content)
        return json.loads(content) if content else None
    finally:
        connection.close()


def topic_path(name: str) -> str:
    return f"/v1/topics/{name.replace('/', '%2F')}"


def test_any_process_answers_for_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        options = ("--processes", "3")
        async with running_server(tmp_path, listeners=("http",), options=options) as server:
            address = server.addresses["http"]

            def work() -> None:
                for turn in range(4):
                    for name in NAMES:
                        said = ask(
                            address, "POST", f"{topic_path(name)}/messages", {"text": f"{turn}"}
                        )
                        assert said["offset"] == turn + 1
                for name in NAMES:
                    found = ask(address, "GET", f"{topic_path(name)}/messages?offset=1&limit=10")
                    payloads = [message["text"] for message in found["messages"]]
                    assert payloads == ["0", "1", "2", "3"], found
                for _ in range(6):
                    listed = ask(address, "GET", "/v1/topics?pattern=orders/*")
                    counts = {topic["name"]: topic["messages"] for topic in listed["topics"]}
                    assert counts == dict.fromkeys(NAMES, 4)

            await asyncio.to_thread(work)
            async with connect(server.url, deadline_s=SECONDS_MAX) as bus:
                status = await bus.cluster()
                assert len([node for node in status.nodes if node.shards]) == 3
            await server.stop()

    asyncio.run(scenario())


def scrape(address: str) -> tuple[dict[str, float], dict[str, float]]:
    """By node: whether it answered, and the messages that it has accepted."""
    connection = http.client.HTTPConnection(address, timeout=SECONDS_MAX)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
    finally:
        connection.close()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[sample.labels["node"]] = sample.value
    return found["runnel_node_up"], found["runnel_messages_in_total"]


def test_scrape_of_any_process_has_the_metrics_of_all_also_while_one_is_gone(
    tmp_path: Path,
) -> None:
    everyone = {"node-1": 1.0, "node-2": 1.0, "node-3": 1.0}

    async def scenario() -> None:
        options = ("--processes", "3")
        async with running_server(tmp_path, listeners=("http",), options=options) as server:
            address = server.addresses["http"]

            def scrapes() -> list[tuple[dict[str, float], dict[str, float]]]:
                """So many that the kernel hands them to more than one process."""
                return [scrape(address) for _ in range(9)]

            def publish() -> None:
                for name in NAMES:
                    ask(address, "POST", f"{topic_path(name)}/messages", {"text": "x"})

            async def everyone_is_up() -> None:
                async with asyncio.timeout(SECONDS_MAX):
                    while any(is_up != everyone for is_up, _ in await asyncio.to_thread(scrapes)):
                        pass  # nine scrapes are a pause

            await everyone_is_up()
            await asyncio.to_thread(publish)
            found = await asyncio.to_thread(scrapes)
            assert all(each == found[0] for each in found)
            is_up, messages_in = found[0]
            assert is_up == everyone
            assert sum(messages_in.values()) == len(NAMES)

            # It lives and does not answer; its parent notices after 10 s, a scrape waits for less.
            hanging = server.nodes()["node-2"]
            hanging.suspend()
            try:
                is_up, messages_in = await asyncio.to_thread(scrape, address)
            finally:
                hanging.kill()
            assert is_up == everyone | {"node-2": 0.0}
            assert set(messages_in) == {"node-1", "node-3"}
            await everyone_is_up()  # it was started again
            await server.stop()

    asyncio.run(scenario())


def test_any_process_delivers_the_work_of_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        options = ("--processes", "3")
        async with running_server(tmp_path, listeners=("grpc",), options=options) as server:
            async with connect(server.url, deadline_s=SECONDS_MAX) as bus:
                for turn in range(3):
                    for name in NAMES:
                        await bus.publish(name, b"%d" % turn)
                assert len([node for node in (await bus.cluster()).nodes if node.shards]) == 3
            async with (
                asyncio.timeout(SECONDS_MAX),
                connect_grpc(server.addresses["grpc"], now_ns=time.time_ns) as caller,
                caller.consume("work", "orders/*") as consumer,
            ):
                found = []
                for _ in range(3 * len(NAMES)):
                    work = await anext(consumer)
                    found.append((work.topic, work.payload))
                    await work.ack(stored=len(found) % 10 == 0)
            assert sorted(found) == sorted(
                (name, b"%d" % turn) for name in NAMES for turn in range(3)
            )
            async with connect(server.url, deadline_s=SECONDS_MAX) as bus:
                assert [each.backlog for each in (await bus.subscription("work")).members] == [0]
            await server.stop()

    asyncio.run(scenario())
