"""Consumers in processes of their own, killed again and again under load, and the broker too."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from runnel.client import connect
from tests.server.load import SMALL
from tests.server.notes import now_ns
from tests.server.serving import Server, serving
from tests.server.worker import SUBSCRIPTION
from tests.server.workforce import (
    STYLES,
    Feed,
    Outage,
    Workforce,
    check_everything_was_done,
    check_failures_are_counted,
    check_keys_are_in_order,
    check_keys_are_with_one_at_a_time,
    check_stored_acks_hold,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = (*SMALL, "log.state_log_bytes_max=8KiB")
# Messages that are processed, by all together, between one death and the next.
DONE_MIN, DONE_MAX = 100, 500
FAILING = 0.02


async def kill_broker(server: Server) -> Outage:
    begin_ns = now_ns()
    server.kill()
    await server.start()
    return Outage(begin_ns, now_ns())


async def all_settled(url: str) -> None:
    """Until nothing is owed any more."""
    async with asyncio.timeout(60), connect(url) as bus:
        while True:
            state = await bus.subscription(SUBSCRIPTION)
            (member,) = state.members
            if not member.backlog and not member.in_flight:
                assert state.dead == 0
                return


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("mode", ["shared", "key_shared"])
def test_killed_consumers_and_brokers_lose_nothing_and_stored_acks_hold(
    tmp_path: Path, mode: str, seed: int
) -> None:
    async def scenario() -> None:
        random = Random(f"{mode} {seed}")
        outages: list[Outage] = []
        async with serving(tmp_path, *SETTINGS) as server:
            workforce = Workforce(server.url, mode, seed, failing=FAILING)
            feed = Feed(server.url, seed, workforce)
            try:
                for style in STYLES:
                    await workforce.start(style)
                feed.start()
                rounds = ["worker", "broker", "worker", "both", "broker"]
                random.shuffle(rounds)
                for victim in rounds:
                    await workforce.work_on(random.randint(DONE_MIN, DONE_MAX))
                    for _ in range(random.randrange(50)):
                        await asyncio.sleep(0)
                    worker = random.choice(workforce.running)
                    if victim != "broker":
                        await workforce.kill(worker)
                    if victim != "worker":
                        outages.append(await kill_broker(server))
                    if victim != "broker":  # another of its kind takes its place
                        await workforce.start(worker.style)
                await workforce.work_on(DONE_MIN)
                await feed.end()
                await workforce.wait_for(lambda: workforce.done >= feed.stored.keys())
                await all_settled(server.url)
                await workforce.stop()
            finally:
                await feed.discard()
                await workforce.discard()
            await server.stop()
        assert "Traceback" not in server.told, server.told
        check_everything_was_done(workforce, feed.stored)
        check_stored_acks_hold(workforce.workers)
        check_failures_are_counted(workforce)
        if mode == "key_shared":
            check_keys_are_in_order(workforce.workers)
            check_keys_are_with_one_at_a_time(workforce.workers, outages)

    asyncio.run(scenario())
