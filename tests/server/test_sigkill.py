"""A real server that is killed again and again, under clients that stay."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from random import Random

import pytest

from runnel.client import connect
from tests.server.load import SMALL, TOPICS, Found, Ledger, Load, Place, read_stored
from tests.server.serving import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KILLS = 5
# Between a start and the next kill, messages of all publishers together.
ACKNOWLEDGED_MIN, ACKNOWLEDGED_MAX = 200, 2500
# At this part of the starts the server is killed once before it listens: recovery is met as well.
EARLY_KILLS = 0.4


async def kill_and_restart(server: Server, load: Load, random: Random) -> None:
    """At a moment that nothing in particular happens at, or everything."""
    wanted = load.acknowledged + random.randint(ACKNOWLEDGED_MIN, ACKNOWLEDGED_MAX)
    await load.wait_for(lambda: load.acknowledged >= wanted)
    for _ in range(random.randrange(200)):
        await asyncio.sleep(0)
    server.kill()
    if random.random() < EARLY_KILLS:
        server.spawn()
        with pytest.raises(subprocess.TimeoutExpired):  # a moment of its start, and not its end
            await asyncio.to_thread(server.wait_some, random.uniform(0.05, 0.6))
        server.kill()
    await server.start()


def check_places(stored: dict[Place, list[Found]]) -> dict[bytes, tuple[Place, int]]:
    """Offsets have no holes, and nothing is there twice; where each payload is."""
    places: dict[bytes, tuple[Place, int]] = {}
    for place, found in stored.items():
        assert [offset for offset, _ in found] == list(range(1, len(found) + 1)), place
        for offset, payload in found:
            if payload != b"first":
                assert payload not in places, f"{payload!r}: {places[payload]}, {place} {offset}"
                places[payload] = (place, offset)
    return places


def check_order(stored: dict[Place, list[Found]]) -> None:
    """Each publisher's messages in the order in which it sent them."""
    for place, found in stored.items():
        last: dict[bytes, int] = {}
        for _, payload in found:
            if payload != b"first":
                name, _, number = payload.partition(b":")
                assert int(number) > last.get(name, 0), (place, payload)
                last[name] = int(number)


def check_promises(ledger: Ledger, places: dict[bytes, tuple[Place, int]]) -> None:
    """Everything that was acknowledged is where it was said to be."""
    broken = [
        (payload, promised, places.get(payload))
        for payload, promised in ledger.acknowledged.items()
        if places.get(payload) != promised
    ]
    assert not broken, f"{len(broken)} of {len(ledger.acknowledged)}, the first: {broken[:3]}"


@pytest.mark.parametrize("seed", [1])
def test_killed_server_loses_repeats_and_reorders_nothing(tmp_path: Path, seed: int) -> None:
    async def scenario() -> None:
        random = Random(seed)
        async with serving(tmp_path, *SMALL) as server:
            load = Load(server.url, seed)
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
        assert "Traceback" not in server.told, server.told

    asyncio.run(scenario())
