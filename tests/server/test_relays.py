"""REST at real processes: whichever of them a request meets, it is answered for all."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from runnel.client import connect
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
