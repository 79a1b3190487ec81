"""examples/node-client against the real server on a socket: a client written from docs/protocol.md alone works."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runnel.broker.fetcher import FetchRequest
from runnel.config import GrpcSettings, HttpSettings, NativeSettings, Settings
from runnel.formats.message import Message
from runnel.server import Server, open_server

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "node-client"
SECONDS_MAX = 60

Line = dict[str, Any]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its one package; none of it is left in the tree."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules"))
    problem = ""
    for options in (["--offline"], []):
        command = ["npm", "ci", "--no-audit", "--no-fund", *options]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
        if done.returncode == 0:
            return folder
        problem = done.stderr.strip()[-300:]
    pytest.skip(f"npm cannot install the msgpack package: {problem}")


def test_the_lock_file_names_no_registry() -> None:
    assert "resolved" not in (EXAMPLE / "package-lock.json").read_text(encoding="utf-8")


def test_node_reads_the_test_vectors(client: Path) -> None:
    environment = {**os.environ, "RUNNEL_VECTORS": str(ROOT / "tests" / "vectors")}
    done = subprocess.run(
        ["node", "--test"],
        cwd=client,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "# fail 0" in done.stdout


# --- With a broker ---


class Node:
    """Runs the example's command line against one broker."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port

    @asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        async with self._node("cli.js", *arguments, f"--port={self._port}") as process:
            yield process

    @asynccontextmanager
    async def _node(self, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            "node",
            *arguments,
            cwd=self._folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:  # the test has failed, and must not leave it behind
                process.kill()
                await process.communicate()

    async def lines(self, *arguments: str) -> list[Line]:
        async with self.running(*arguments) as process:
            output, problem = await process.communicate()
        assert process.returncode == 0, problem.decode()
        return [json.loads(line) for line in output.splitlines()]

    async def script_lines(self, script: str) -> list[Any]:
        """What a program of its own prints; it is given the port."""
        words = ("--input-type=module", "--eval", script, str(self._port))
        async with self._node(*words) as process:
            output, problem = await process.communicate()
        assert process.returncode == 0, problem.decode()
        return [json.loads(line) for line in output.splitlines()]

    async def refused(self, *arguments: str) -> str:
        async with self.running(*arguments) as process:
            _, problem = await process.communicate()
        assert process.returncode == 1
        return problem.decode()


def run(client: Path, directory: Path, scenario: Callable[[Node, Server], Awaitable[None]]) -> None:
    settings = Settings(
        data=str(directory),
        native=NativeSettings(listen="127.0.0.1:0"),
        http=HttpSettings(listen=None),
        grpc=GrpcSettings(listen=None),
    )

    async def main() -> None:
        async with asyncio.timeout(SECONDS_MAX), open_server(settings) as server:
            port = int(server.addresses["native"].rpartition(":")[2])
            await scenario(Node(client, port), server)

    asyncio.run(main())


def told(lines: Sequence[Line], *names: str) -> list[list[Any]]:
    return [[line[name] for name in names] for line in lines]


@pytest.mark.slow
def test_node_publishes_and_fetches(client: Path, tmp_path: Path) -> None:
    async def scenario(node: Node, server: Server) -> None:
        (one,) = await node.lines("publish", "sensors/a", "21.5", "--key", "a", "--tag", "unit=C")
        assert (one["offset"], one["level"]) == (1, "stored")
        (batch,) = await node.lines("publish", "sensors/a", "21.6", "", "grüße", "--key", "b")
        assert (batch["offset"], batch["level"]) == (2, "stored")
        *messages, page = await node.lines("fetch", "sensors/a", "--offset", "1")
        assert told(messages, "offset", "payload", "key", "tags") == [
            [1, "21.5", "a", {"unit": "C"}],
            [2, "21.6", "b", {}],
            [3, "", "b", {}],
            [4, "grüße", "b", {}],
        ]
        assert page == {"nextOffset": 5, "firstOffset": 1, "endOffset": 5}
        *messages, page = await node.lines("fetch", "sensors/a", "--offset", "2", "--count", "1")
        assert told(messages, "offset", "payload") == [[2, "21.6"]]
        assert page["nextOffset"] == 3
        fetched = await server.broker.fetch(FetchRequest("sensors/a", 0, offset=1))
        stored = [message for each in fetched.batches for message in each]
        assert [message.payload for message in stored] == [b"21.5", b"21.6", b"", "grüße".encode()]
        assert all(message.event_time_ns and message.transmit_time_ns for message in stored)

    run(client, tmp_path / "data", scenario)


@pytest.mark.slow
def test_node_subscribes_from_the_past_into_the_present(client: Path, tmp_path: Path) -> None:
    async def scenario(node: Node, server: Server) -> None:
        await server.broker.send(Message("sensors/a", b"old", key=b"k", event_time_ns=7))
        arguments = ["sensors/*", "--start", "earliest", "--count", "3"]
        async with node.running("subscribe", *arguments) as process:
            assert process.stdout is not None
            first = [json.loads(await process.stdout.readline()) for _ in range(2)]
            assert first[0] == {"subscribed": ["sensors/*"]}
            assert told(first[1:], "topic", "offset", "payload", "key", "eventTimeNs") == [
                ["sensors/a", 1, "old", "k", "7"]
            ]
            await server.broker.send(Message("other", b"not asked for"))
            await server.broker.send(Message("sensors/b", b"new", tags={"unit": "C"}))
            await server.broker.send(Message("sensors/a", b"newer"))
            rest = [json.loads(await process.stdout.readline()) for _ in range(2)]
            assert told(rest, "topic", "offset", "payload", "tags") == [
                ["sensors/b", 1, "new", {"unit": "C"}],
                ["sensors/a", 2, "newer", {}],
            ]
            assert await process.wait() == 0  # it has unsubscribed and closed by itself

    run(client, tmp_path / "data", scenario)


@pytest.mark.slow
def test_node_consumes_and_what_it_acknowledged_does_not_come_again(
    client: Path, tmp_path: Path
) -> None:
    async def scenario(node: Node, server: Server) -> None:
        for number in range(3):
            await server.broker.send(Message("orders/eu", b"%d" % number, key=b"k"))
        first = await node.lines("consume", "billing", "orders/*", "--count", "2")
        assert first[0] == {"consuming": "billing"}
        assert told(first[1:], "offset", "payload", "failures") == [[1, "0", 0], [2, "1", 0]]
        await server.broker.send(Message("orders/us", b"new"))
        rest = await node.lines("consume", "billing", "--count", "2")
        assert sorted(told(rest[1:], "topic", "offset", "failures")) == [
            ["orders/eu", 3, 0],
            ["orders/us", 1, 0],
        ]
        (state,) = await server.broker.consumer_groups.subscriptions("billing")
        assert (state.mode, state.members[0].backlog) == ("shared", 0)

    run(client, tmp_path / "data", scenario)


# Refuses the first message of a key once: it and the later one, recalled, come again in order.
REFUSING = """
import { connect } from "./runnel.js";

const bus = await connect({ port: Number(process.argv[1]) });
const consumer = await bus.consume("billing", "orders/*", { mode: "key_shared" });
let left = 4;
for await (const message of consumer) {
  console.log(JSON.stringify([message.offset, Buffer.from(message.key).toString(), message.failures]));
  if (message.offset === 1 && message.failures === 0) {
    consumer.nack(message, { delayMs: 100, reason: "not yet" });
    await bus.ping(); // the recall comes before the answer
  } else {
    consumer.renew();
    consumer.ack(message);
    if (--left === 0) break;
  }
}
await bus.close();
"""


@pytest.mark.slow
def test_node_refuses_a_message_and_gets_its_key_again_in_order(
    client: Path, tmp_path: Path
) -> None:
    async def scenario(node: Node, server: Server) -> None:
        for key in (b"a", b"b", b"a", b"b"):
            await server.broker.send(Message("orders/eu", b"x", key=key))
        lines = await node.script_lines(REFUSING)
        assert [line for line in lines if line[1] == "a"] == [[1, "a", 0], [1, "a", 1], [3, "a", 0]]
        assert [line for line in lines if line[1] == "b"] == [[2, "b", 0], [4, "b", 0]]
        (state,) = await server.broker.consumer_groups.subscriptions("billing")
        assert state.members[0].backlog == 0

    run(client, tmp_path / "data", scenario)


@pytest.mark.slow
def test_node_reads_more_than_its_credit(client: Path, tmp_path: Path) -> None:
    async def scenario(node: Node, server: Server) -> None:
        for number in range(40):
            await server.broker.send(Message("bulk", b"%03d" % number + bytes(100_000)))
        lines = await node.lines("subscribe", "bulk", "--start", "earliest", "--count", "40")
        assert [line["payload"][:3] for line in lines[1:]] == [f"{each:03d}" for each in range(40)]

    run(client, tmp_path / "data", scenario)


@pytest.mark.slow
def test_node_is_told_what_was_wrong(client: Path, tmp_path: Path) -> None:
    async def scenario(node: Node, server: Server) -> None:
        assert (await node.refused("fetch", "nowhere")).startswith("unknown_topic: ")
        assert (await node.refused("publish", "bad\nname", "x")).startswith("invalid_name: ")
        assert (await node.refused("subscribe", "[")).startswith("invalid_name: ")
        assert (await node.refused("consume", "nobody")).startswith("unknown_subscription: ")

    run(client, tmp_path / "data", scenario)


@pytest.mark.slow
def test_node_is_told_when_the_broker_goes(client: Path, tmp_path: Path) -> None:
    async def scenario(node: Node, server: Server) -> None:
        async with node.running("subscribe", "*") as process:
            assert process.stdout is not None
            await process.stdout.readline()
            await server.drain()
            _, problem = await process.communicate()
        assert process.returncode == 1
        assert problem.decode().startswith("connection_lost: ")

    run(client, tmp_path / "data", scenario)
