"""A real server that is killed again and again under its clients."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from random import Random

import pytest

from runnel.client import connect
from tests.server.load import (
    SMALL,
    TOPICS,
    ClientLoad,
    FoundMessage,
    PublishLedger,
    StoredAt,
    TopicPartition,
    read_stored,
)
from tests.server.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KILLS = 5
# Acknowledged messages of all publishers between a start and the next kill.
ACKNOWLEDGED_MIN, ACKNOWLEDGED_MAX = 200, 2500
# The part of the starts at which the server is killed before it listens, so that kills also hit recovery.
EARLY_KILLS = 0.4


async def kill_and_restart(server: ServerProcess, load: ClientLoad, random: Random) -> None:
    """Kill the server at a random moment, and start it again."""
    wanted = load.acknowledged + random.randint(ACKNOWLEDGED_MIN, ACKNOWLEDGED_MAX)
    await load.wait_for(lambda: load.acknowledged >= wanted)
    for _ in range(random.randrange(200)):
        await asyncio.sleep(0)
    server.kill()
    if random.random() < EARLY_KILLS:
        server.spawn()
        with pytest.raises(subprocess.TimeoutExpired):  # it is still starting
            await asyncio.to_thread(server.wait_some, random.uniform(0.05, 0.6))
        server.kill()
    await server.start()


def check_places(stored: dict[TopicPartition, list[FoundMessage]]) -> dict[bytes, StoredAt]:
    """Offsets have no holes, and no payload is stored twice. Returns where each is."""
    places: dict[bytes, StoredAt] = {}
    for place, found in stored.items():
        assert [offset for offset, _ in found] == list(range(1, len(found) + 1)), place
        for offset, payload in found:
            if payload != b"first":
                assert payload not in places, f"{payload!r}: {places[payload]}, {place} {offset}"
                places[payload] = (place, offset)
    return places


def check_order(stored: dict[TopicPartition, list[FoundMessage]]) -> None:
    """Each publisher's messages are stored in the order in which it sent them."""
    for place, found in stored.items():
        last: dict[bytes, int] = {}
        for _, payload in found:
            if payload != b"first":
                name, _, number = payload.partition(b":")
                assert int(number) > last.get(name, 0), (place, payload)
                last[name] = int(number)


def check_promises(ledger: PublishLedger, places: dict[bytes, StoredAt]) -> None:
    """Every acknowledged message is stored where its receipt says."""
    broken = [
        (payload, promised, places.get(payload))
        for payload, promised in ledger.acknowledged.items()
        if places.get(payload) != promised
    ]
    assert not broken, f"{len(broken)} of {len(ledger.acknowledged)}, the first: {broken[:3]}"


@pytest.mark.parametrize(("seed", "shards"), [(1, 1), (2, 4)])
def test_killed_server_loses_repeats_and_reorders_nothing(
    tmp_path: Path, seed: int, shards: int
) -> None:
    async def scenario() -> None:
        random = Random(seed)
        settings = (*SMALL, f"log.journal_shards={shards}")
        async with running_server(tmp_path, *settings) as server:
            load = ClientLoad(server.url, seed)
            try:
                await load.subscribe("a")
                await load.subscribe("parts/p", "own/x")
                await load.subscribe("*")
                await load.subscribe("own/*", "parts/?")
                await load.fetch("b", 0)
                await load.fetch("parts/q", 1)
                for number in range(3):
                    await load.publish_named(f"named-{number}")
                for number in range(2):
                    await load.publish_unnamed(f"unnamed-{number}")
                await load.publish_singly("single")
                for _ in range(KILLS):
                    await kill_and_restart(server, load, random)
                await load.end_publishing()
                async with connect(server.url) as bus:
                    stored = await read_stored(bus)
                places = check_places(stored)
                check_order(stored)
                assert load.named.failures == []
                for ledger in (load.named, load.unnamed):
                    check_promises(ledger, places)
                named = {payload for payload in places if payload.startswith(b"named-")}
                assert named == set(load.named.acknowledged)
                await load.end_reading(stored)
                for reading in load.readings:
                    expected = {place: stored[place] for place in stored if reading.covers(place)}
                    assert dict(reading.found) == expected, reading.name
                assert {place.topic for place in stored} == set(TOPICS)
            finally:
                await load.close()
            await server.stop()
        assert "Traceback" not in server.stderr, server.stderr

    asyncio.run(scenario())
