"""A real broker of several processes: kills, signals, other numbers of processes, and what it refuses."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from runnel.client import Bus, connect
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.server.load import SMALL, TOPICS, ClientLoad, FoundMessage, TopicPartition
from tests.server.server_process import SECONDS_MAX, ServerProcess, held_port, running_server
from tests.server.test_sigkill import check_order, check_places, check_promises

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SEVERAL = ("--processes", "3")
NODES = {"node-1", "node-2", "node-3"}


def _is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. One that has ended stays listed until its parent has taken note."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def events(server: ServerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]


async def until(condition: Callable[[], bool], server: ServerProcess) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while not condition():
            assert server.process.status() != psutil.STATUS_ZOMBIE, server.stderr
            await asyncio.sleep(0.02)


async def all_serve(server: ServerProcess) -> None:
    """Wait until every node has a process that lives, and answers."""
    await until(lambda: set(server.nodes()) == NODES, server)


async def read_all(bus: Bus) -> dict[TopicPartition, list[FoundMessage]]:
    """All stored messages, read from the nodes that have them."""
    stored: dict[TopicPartition, list[FoundMessage]] = {}
    for topic, route in (await bus.routes(*TOPICS)).items():
        for partition in range(len(route.owners)):
            found = stored[TopicPartition(topic, partition)] = []
            offset = 1
            while messages := (await bus.fetch(topic, offset, partition=partition)).messages:
                found += [FoundMessage(each.offset, each.payload) for each in messages]
                offset = messages[-1].offset + 1
    return stored


async def check_everything_is_there(server: ServerProcess, load: ClientLoad) -> None:
    async with connect(server.url, deadline_s=SECONDS_MAX) as bus:
        stored = await read_all(bus)
    places = check_places(stored)
    # Without a name, a batch that was in flight behind one that was refused as moved may have overtaken it.
    numbered = {
        place: [each for each in found if not each.payload.startswith(b"unnamed:")]
        for place, found in stored.items()
    }
    check_order(numbered)
    for ledger in (load.named, load.unnamed):
        check_promises(ledger, places)
    assert load.named.failures == []


async def publish_all_ways(load: ClientLoad) -> None:
    await load.publish_named("named-0")
    await load.publish_named("named-1")
    await load.publish_unnamed("unnamed")
    await load.publish_singly("single")


def test_killed_children_are_started_again_and_nothing_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, *SMALL, options=SEVERAL) as server:
            load = ClientLoad(server.url, seed=1)
            try:
                await publish_all_ways(load)
                for wanted, victim in ((300, "node-2"), (900, "node-1"), (1500, "node-3")):
                    await load.wait_for(lambda: load.acknowledged >= wanted)  # noqa: B023
                    await all_serve(server)
                    server.nodes()[victim].kill()
                acknowledged = load.acknowledged
                await load.wait_for(lambda: load.acknowledged >= acknowledged + 300)
                await load.end_publishing()
                await check_everything_is_there(server, load)
            finally:
                await load.close()
            await all_serve(server)
            told = Counter(
                line["process"]
                for line in events(server)
                if line["event"] == "a process has ended and is started again"
            )
            assert told == dict.fromkeys(NODES, 1)

            def restarted() -> dict[str, str]:
                kind = "node_restarted"
                lines = [line for line in events(server) if line.get("kind") == kind]
                return {line["subject"]: line["end"] for line in lines}

            await until(lambda: restarted() == dict.fromkeys(NODES, "SIGKILL"), server)
            await server.stop()

    asyncio.run(scenario())


def test_sigterm_under_load_ends_everything_in_good_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(
            tmp_path, *SMALL, "native.drain_timeout=5s", options=SEVERAL
        ) as server:
            load = ClientLoad(server.url, seed=2)
            try:
                await publish_all_ways(load)
                for wanted in (300, 900):
                    await load.wait_for(lambda: load.acknowledged >= wanted)  # noqa: B023
                    children = list(server.nodes().values())
                    begin = time.monotonic()
                    await server.stop()
                    assert time.monotonic() - begin < 20
                    assert not any(_is_alive(child) for child in children)
                    await server.start()
                await load.end_publishing()
                await check_everything_is_there(server, load)
            finally:
                await load.close()
            # The second start found that the first life had ended in good order.
            assert not [line for line in events(server) if "was recovered" in line["event"]]
            assert "Traceback" not in server.stderr, server.stderr

    asyncio.run(scenario())


def test_killed_parent_takes_its_children_along_and_the_next_one_begins_at_once(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, *SMALL, options=SEVERAL) as server:
            load = ClientLoad(server.url, seed=3)
            try:
                await publish_all_ways(load)
                for wanted in (300, 900):
                    await load.wait_for(lambda: load.acknowledged >= wanted)  # noqa: B023
                    children = list(server.nodes().values())
                    server.kill()
                    await server.start()  # without a pause
                    assert not any(_is_alive(child) for child in children)
                await load.end_publishing()
                await check_everything_is_there(server, load)
            finally:
                await load.close()
            await server.stop()

    asyncio.run(scenario())


def test_directory_is_opened_with_more_and_fewer_processes_than_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        count = 0
        with held_port() as port:
            for processes in ("1", "3", "2", "1"):
                options = ("--processes", processes)
                server = ServerProcess(tmp_path, port, ("log.allocate_bytes=64KiB",), options)
                try:
                    await server.start()
                    async with connect(server.url, deadline_s=SECONDS_MAX) as bus:
                        for number in range(20):
                            await bus.publish(f"topic/{number}", b"%d" % count)
                        count += 1
                        for number in range(20):
                            page = await bus.fetch(f"topic/{number}", 1)
                            found = [int(message.payload) for message in page.messages]
                            assert found == list(range(count)), (processes, number)
                    await server.stop()
                finally:
                    server.discard()

    asyncio.run(scenario())


def test_one_process_writes_what_it_always_did(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, options=("--processes", "1")) as server:
            async with connect(server.url) as bus:
                await bus.publish("a", b"1")
            assert server.process.children() == []
            await server.stop()
        names = {path.name for path in (tmp_path / "data").iterdir()}
        assert names == {"lock", "runnel.json", "metadata", "journals", "synced"}

    asyncio.run(scenario())


def test_all_children_accept_connections_of_the_shared_ports(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, listeners=("http", "grpc"), options=SEVERAL) as server:
            seen: set[str] = set()
            async with asyncio.timeout(SECONDS_MAX):
                while seen != NODES:
                    seen.add(await asyncio.to_thread(_node_of, server.addresses["http"]))
            called: set[str] = set()
            async with asyncio.timeout(SECONDS_MAX):
                while called != NODES:
                    # Otherwise channels to one address share their connection.
                    own = [("grpc.use_local_subchannel_pool", 1)]
                    address = server.addresses["grpc"]
                    async with grpc.aio.insecure_channel(address, options=own) as channel:
                        ping = channel.unary_unary(
                            "/runnel.v1.Runnel/Ping",
                            request_serializer=pb.PingRequest.SerializeToString,
                            response_deserializer=pb.PingResponse.FromString,
                        )
                        called.add((await ping(pb.PingRequest())).node)
            native: set[str] = set()
            async with asyncio.timeout(SECONDS_MAX):
                while native != NODES:
                    async with connect(server.url) as bus:
                        native.add(str((await bus.statistics())["node"]))
            await server.stop()

    asyncio.run(scenario())


def _node_of(address: str) -> str:
    """The node that answers a request on a new connection."""
    connection = http.client.HTTPConnection(address, timeout=SECONDS_MAX)
    try:
        connection.request("GET", "/v1/statistics")
        return str(json.loads(connection.getresponse().read())["node"])
    finally:
        connection.close()


def test_changed_settings_reach_every_child(tmp_path: Path) -> None:
    file = tmp_path / "runnel.toml"
    file.write_text('log_level = "info"\n')

    async def scenario() -> None:
        options = (*SEVERAL, "--config", str(file))
        async with running_server(tmp_path, options=options) as server:
            file.write_text('log_level = "warning"\n[limits]\ntags_max = 3\n')
            server.send_signal(signal.SIGHUP)
            await until(
                lambda: (
                    {
                        line["node"]
                        for line in events(server)
                        if line["event"] == "setting needs a restart"
                        and line["key"] == "limits.tags_max"
                    }
                    == NODES
                ),
                server,
            )
            file.write_text("nonsense = 1\n")
            server.send_signal(signal.SIGHUP)
            await until(lambda: "the settings were not reloaded" in server.stderr, server)
            assert set(server.nodes()) == NODES
            await server.stop()

    asyncio.run(scenario())


def test_child_that_gets_sigterm_is_replaced(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, *SMALL, options=SEVERAL) as server:
            load = ClientLoad(server.url, seed=4)
            try:
                await publish_all_ways(load)
                await load.wait_for(lambda: load.acknowledged >= 300)
                first = server.nodes()["node-1"]
                first.terminate()
                await until(lambda: not _is_alive(first), server)
                await all_serve(server)
                await load.end_publishing()
                await check_everything_is_there(server, load)
            finally:
                await load.close()
            assert set(server.nodes()) == NODES
            await server.stop()

    asyncio.run(scenario())


def test_commands_show_the_cluster_and_move_its_shards(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, options=SEVERAL) as server:
            async with connect(server.url) as bus:
                for number in range(20):
                    await bus.publish(f"topic/{number}", b"1")

            async def run(*words: str) -> str:
                ended = await asyncio.to_thread(cluster_command, server, *words)
                assert ended.returncode == 0, ended.stderr
                return ended.stdout

            async def owners() -> dict[str, str]:
                async with connect(server.url) as bus:
                    shards = (await bus.cluster()).shards
                return {f"{each.journal}/{each.shard}": each.node for each in shards}

            async def owners_until(holds: Callable[[dict[str, str]], bool]) -> None:
                async with asyncio.timeout(SECONDS_MAX):
                    while not holds(await owners()):  # noqa: ASYNC110 - in another process
                        await asyncio.sleep(0.02)

            async with asyncio.timeout(SECONDS_MAX), connect(server.url) as bus:
                pids = {child.pid for child in server.nodes().values()}
                # They say so with their first loads.
                while {node.pid for node in (await bus.cluster()).nodes} != pids:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            status = json.loads(await run("status", "--json"))
            assert {node["pid"] for node in status["nodes"]} == pids
            assert {f"{s['journal']}/{s['shard']}" for s in status["shards"]} == set(await owners())
            shard, _ = next(pair for pair in (await owners()).items() if pair[1] != "node-2")
            await run("move", shard, "node-2")
            await owners_until(lambda found: found[shard] == "node-2")
            await run("drain", "node-2")
            await owners_until(lambda found: set(found.values()) == {"node-1", "node-3"})
            shown = await run("status")
            assert [line.split()[:2] for line in shown.splitlines()[1:4]] == [
                ["node-1", "serves"],
                ["node-2", "drains"],
                ["node-3", "serves"],
            ]
            assert shard in shown
            await run("drain", "node-2", "--undo")
            await run("balance")
            wrong = await asyncio.to_thread(cluster_command, server, "move", shard, "node-9")
            assert wrong.returncode == 2
            assert "node-9" in wrong.stderr
            await server.stop()

    asyncio.run(scenario())


def cluster_command(server: ServerProcess, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `runnel cluster …`."""
    return subprocess.run(
        [sys.executable, "-m", "runnel", "cluster", *words, "--url", server.url],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_ports_and_directory_in_use_are_refused_as_by_one_process(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(
            tmp_path, listeners=("http", "grpc"), options=("--processes", "2")
        ) as first:
            taken = {"native": f"127.0.0.1:{first.port}", **first.addresses}
            for listener, address in taken.items():
                addresses = {**dict.fromkeys(taken, "127.0.0.1:0"), listener: address}
                ended = await asyncio.to_thread(serve, tmp_path / "second", addresses)
                assert ended.returncode == 2
                assert f"{listener}.listen" in ended.stderr
                assert "in use" in ended.stderr
            ended = await asyncio.to_thread(serve, tmp_path / "data", {})
            assert ended.returncode == 3
            assert f"is locked by process {first.process.pid}" in ended.stderr
            await first.stop()

    asyncio.run(scenario())


def test_settings_that_no_child_can_use_are_refused_with_their_text(tmp_path: Path) -> None:
    wrong = ("--set", "native.tls_certificate=/nowhere/a.pem", "--set", "native.tls_key=/nowhere/b")
    ended = serve(tmp_path / "data", {}, *wrong)
    assert ended.returncode == 2
    assert "/nowhere/a.pem" in ended.stderr
    assert ended.stdout == ""
    ended = serve("memory:", {})
    assert ended.returncode == 2
    refused = 'cluster.processes = 2 (--processes) cannot be with data = "memory:" (--data)'
    assert refused in ended.stderr


def serve(
    data: Path | str, addresses: Mapping[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    """Run `runnel serve` with two processes, which ends by itself. Listeners without an address stay closed."""
    addresses = {"native": "127.0.0.1:0", "http": "none", "grpc": "none", **addresses}
    command = [sys.executable, "-m", "runnel", "serve", "--processes", "2", "--data", str(data)]
    for name, address in addresses.items():
        command += ["--set", f"{name}.listen={address}"]
    return subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
