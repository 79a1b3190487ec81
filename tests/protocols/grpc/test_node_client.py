"""examples/node-grpc against the real server on a socket: a client made from the .proto alone works."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import Scene, opened, publish, run, until_calls

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "node-grpc"
PROTO = ROOT / "proto" / "runnel" / "v1" / "runnel.proto"
SECONDS_MAX = 60

pytestmark = pytest.mark.xdist_group("node-grpc")  # its packages are installed once

Line = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its packages; none of it is left in the tree."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    copy = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("node_modules"))
    problem = ""
    for options in (["--offline"], ["--prefer-offline"]):
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", *options]
        try:
            done = subprocess.run(
                command, cwd=copy, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            problem = f"no answer within {SECONDS_MAX} seconds"
            continue
        if done.returncode == 0:
            return copy
        problem = done.stderr.strip()[-300:]
    pytest.skip(
        f"npm can install the packages of gRPC neither from its cache nor at all: {problem}"
    )


class Node:
    """Runs the example's command line against one broker."""

    def __init__(self, folder: Path, scene: Scene) -> None:
        self._folder = folder
        self._address = scene.listener.address

    @asynccontextmanager
    async def running(self, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            "node",
            "cli.js",
            *arguments,
            f"--address={self._address}",
            f"--proto={PROTO}",
            cwd=self._folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def lines(self, *arguments: str, code: int = 0) -> list[Line]:
        async with self.running(*arguments) as process:
            out, err = await process.communicate()
            assert process.returncode == code, err.decode()
            return [json.loads(line) for line in (out or err).splitlines()]


def test_the_lock_file_names_no_registry() -> None:
    assert "resolved" not in (EXAMPLE / "package-lock.json").read_text(encoding="utf-8")


def test_node_publishes_and_fetches(folder: Path) -> None:
    async def scenario() -> None:
        async with opened() as scene:
            node = Node(folder, scene)
            (receipt,) = await node.lines("publish", "a", "21.5", "--key=k", "--tag=unit=C")
            assert (receipt["offset"], receipt["level"]) == ("1", "LEVEL_RECEIVED")
            (answers,) = await node.lines("publish", "a", "1", "2", "3")
            assert answers["offsets"] == ["2", "3", "4"]
            first, *_, page = await node.lines("fetch", "a")
            assert (first["payload"], first["key"], first["tags"]) == ("21.5", "k", {"unit": "C"})
            assert page == {"nextOffset": "5", "endOffset": "5"}
            fetched = await scene.stub.Fetch(pb.FetchRequest(topic="a"))
            assert [message.payload for message in fetched.messages] == [b"21.5", b"1", b"2", b"3"]
            (topic,) = await node.lines("topics", "a")
            assert topic["messages"] == "4"

    run(scenario())


def test_node_is_told_what_is_wrong(folder: Path) -> None:
    async def scenario() -> None:
        async with opened() as scene:
            (problem,) = await Node(folder, scene).lines("fetch", "nowhere", code=1)
            assert (problem["code"], problem["retriable"]) == ("unknown_topic", False)

    run(scenario())


def test_node_reads_live_and_comes_back(folder: Path) -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "t/a", b"1")
            node = Node(folder, scene)
            begun, message, event = await node.lines(
                "subscribe", "t/*", "--start=earliest", "--count=1"
            )
            assert (begun["event"], message["payload"]) == ("subscribed", "1")
            await publish(scene, "t/b", b"2")
            position = f"--position={event['position']}"
            _, message, _ = await node.lines("subscribe", "t/*", position, "--count=1")
            assert (message["topic"], message["payload"]) == ("t/b", "2")
            await until_calls(scene, 0)

    run(scenario())


def test_node_consumes_and_acknowledges(folder: Path) -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "t", b"1", b"2")
            node = Node(folder, scene)
            lines = await node.lines("consume", "s", "t", "--mode=shared", "--count=2")
            assert lines[0] == {"consuming": "s"}
            assert [line["payload"] for line in lines[1:3]] == ["1", "2"]
            assert lines[-1]["late"] == []
            listing = pb.ListSubscriptionsRequest(name="s")
            (state,) = (await scene.stub.ListSubscriptions(listing)).subscriptions
            assert state.members[0].backlog == 0

    run(scenario())
