"""The Node.js example at a cluster: basic, so that the node relays; and following routes and `moved` to the owners."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from runnel.testing import open_cluster
from runnel.testing.cluster import EmbeddedCluster
from tests.protocols.native.test_node_client import client
from tests.relay.stage import SETTINGS

__all__ = ["client"]

pytestmark = pytest.mark.slow

BASIC = """
import { connect } from "./runnel.js";
const bus = await connect({ port: Number(process.argv[1]) });
for (let at = 0; at < 12; at++) {
  const { offset } = await bus.publish(`t/${at}`, "x");
  const { messages } = await bus.fetch(`t/${at}`, { offset: 1 });
  console.log(JSON.stringify([offset, messages.length]));
}
await bus.close();
"""

OWNERS = """
import { connect, Owners } from "./runnel.js";
const bus = await connect({ port: Number(process.argv[1]) });
const owners = new Owners(bus, { connect });
for (let turn = 0; turn < 40; turn++) {
  const offsets = [];
  for (let at = 0; at < 12; at++) offsets.push((await owners.publish(`t/${at}`, `${turn}`)).offset);
  const { messages } = await owners.fetch("t/0", { offset: 1 });
  console.log(JSON.stringify([offsets, messages.length, owners.addresses.length]));
}
await owners.close();
await bus.close();
"""


async def begin(cluster: EmbeddedCluster, folder: Path, script: str) -> asyncio.subprocess.Process:
    port = cluster.nodes[0].url.rpartition(":")[2]
    return await asyncio.create_subprocess_exec(
        "node",
        "--input-type=module",
        "--eval",
        script,
        port,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


def test_basic_client_needs_to_know_nothing_of_nodes(client: Path) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), open_cluster(3, SETTINGS) as cluster:
            node = await begin(cluster, client, BASIC)
            output, problem = await node.communicate()
            assert node.returncode == 0, problem.decode()
            assert [json.loads(line) for line in output.splitlines()] == [[1, 1]] * 12

    asyncio.run(scenario())


def test_client_that_follows_routes_goes_on_while_shards_move(client: Path) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), open_cluster(3, SETTINGS) as cluster:
            async with cluster.connect() as bus:
                for at in range(12):
                    await bus.publish(f"t/{at}", b"first")
            node = await begin(cluster, client, OWNERS)
            answer = asyncio.ensure_future(node.communicate())
            turn = 0
            while not answer.done():
                turn += 1
                await cluster.move(cluster.shard_of(f"t/{turn % 12}"), cluster.nodes[turn % 3].name)
                await asyncio.sleep(0.02)
            output, problem = await answer
            assert node.returncode == 0, problem.decode()
            lines = [json.loads(line) for line in output.splitlines()]
            assert [line[0] for line in lines] == [[turn + 2] * 12 for turn in range(40)]
            assert [line[1] for line in lines] == [turn + 2 for turn in range(40)]
            assert lines[-1][2] == 3

    asyncio.run(scenario())
