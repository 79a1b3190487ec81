"""A real broker is killed and a stored bit is flipped: every kind of reader learns which message is missing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from runnel.client import Bus, connect
from tests.server.server_process import ServerProcess, running_server

pytestmark = pytest.mark.timeout(240)

COUNT, LOST = 20, 8
OTHERS = [number for number in range(1, COUNT + 1) if number != LOST]


def text(number: int) -> bytes:
    return b"<message %d>" % number


def flip(server: ServerProcess) -> None:
    [path] = (server.directory / "data/journals/main/0").glob("*.segment")
    content = bytearray(path.read_bytes())
    content[content.index(text(LOST))] ^= 1
    path.write_bytes(content)


def get(server: ServerProcess, path: str) -> Any:
    with urllib.request.urlopen(f"http://{server.addresses['http']}{path}") as answer:
        body = answer.read().decode()
    return body if path == "/metrics" else json.loads(body)


async def check_fetch(server: ServerProcess, bus: Bus) -> None:
    page = await bus.fetch("a", LOST)
    assert [(gap.reason, gap.first_offset, gap.next_offset) for gap in page.gaps] == [
        ("damage", LOST, LOST + 1)
    ]
    assert [message.offset for message in page.messages] == list(range(LOST + 1, COUNT + 1))
    over_http = await asyncio.to_thread(get, server, f"/v1/topics/a/messages?offset={LOST}")
    assert [(gap["reason"], gap["first_offset"]) for gap in over_http["gaps"]] == [("damage", LOST)]
    for told in (page.gaps[0].text, over_http["gaps"][0]["text"]):
        assert ".segment:" in told
        assert "/" not in told  # readers must not learn where the directory is


async def check_live(bus: Bus, pattern: str) -> None:
    async with bus.subscribe(pattern, start="earliest") as subscription:
        read = [(await anext(subscription)).offset for _ in OTHERS]
    assert read == OTHERS
    [gap] = subscription.gaps
    assert (gap.reason, gap.topic, gap.first_offset, gap.missed) == ("damage", "a", LOST, 1)


async def check_work(server: ServerProcess, bus: Bus, name: str) -> None:
    async with bus.consume(name) as consumer:
        done = set()
        for _ in OTHERS:
            work = await anext(consumer)
            done.add(work.message.offset)
            await work.ack(stored=True)
        await consumer.flush()
    assert done == set(OTHERS)
    event = f'"kind": "work_lost", "subject": "{name}"'
    async with asyncio.timeout(30):
        while True:
            state = await bus.subscription(name)
            if not state.members[0].backlog and event in server.stderr:
                return


def check_watched(server: ServerProcess) -> None:
    [damage] = [
        line for line in get(server, "/metrics").splitlines() if line.startswith("runnel_damage ")
    ]
    assert float(damage.split()[1]) == 1
    assert get(server, "/readyz")["warnings"]


def check_offline(server: ServerProcess) -> None:
    data = str(server.directory / "data")
    for words in (["verify", data], ["export", data, "--to", "-"]):
        done = subprocess.run(
            [sys.executable, "-m", "runnel", "log", *words], capture_output=True, check=False
        )
        assert done.returncode == 1, (words, done)
        assert b".segment:" in done.stdout + done.stderr


def test_flipped_bit_after_a_kill_is_told_to_every_reader_on_every_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_server(tmp_path, listeners=("http",)) as server:
            async with connect(server.url) as bus:
                for mode in ("shared", "key_shared"):
                    await bus.make_subscription(mode, "a", mode=mode)
                for number in range(1, COUNT + 1):
                    await bus.publish("a", text(number), key=b"%d" % number)
            server.kill()
            flip(server)
            check_offline(server)
            for start in range(2):
                await server.start()
                async with connect(server.url) as bus:
                    check_watched(server)
                    await check_fetch(server, bus)
                    for pattern in ("a", "?"):
                        await check_live(bus, pattern)
                    if not start:
                        for mode in ("shared", "key_shared"):
                            await check_work(server, bus, mode)
                await server.stop()
                check_offline(server)

    asyncio.run(scenario())
