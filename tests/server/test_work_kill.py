"""Consumer processes and the broker are killed again and again under load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from runnel.client import connect
from tests.server.load import SMALL
from tests.server.server_process import ServerProcess, running_server
from tests.server.worker import SUBSCRIPTION
from tests.server.worker_events import now_ns
from tests.server.worker_processes import (
    STYLES,
    Outage,
    WorkerProcesses,
    WorkPublisher,
    check_everything_was_done,
    check_failures_are_counted,
    check_keys_are_in_order,
    check_keys_are_with_one_at_a_time,
    check_stored_acks_hold,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = (*SMALL, "log.state_log_bytes_max=8KiB")
# Messages that all workers together process between two kills.
DONE_MIN, DONE_MAX = 100, 500
FAILING = 0.02


async def kill_broker(server: ServerProcess) -> Outage:
    begin_ns = now_ns()
    server.kill()
    await server.start()
    return Outage(begin_ns, now_ns())


async def all_settled(url: str) -> None:
    """Wait until the subscription owes nothing."""
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
        async with running_server(tmp_path, *SETTINGS) as server:
            workers = WorkerProcesses(server.url, mode, seed, failing=FAILING)
            publisher = WorkPublisher(server.url, seed, workers)
            try:
                for style in STYLES:
                    await workers.start(style)
                publisher.start()
                rounds = ["worker", "broker", "worker", "both", "broker"]
                random.shuffle(rounds)
                for victim in rounds:
                    await workers.work_on(random.randint(DONE_MIN, DONE_MAX))
                    for _ in range(random.randrange(50)):
                        await asyncio.sleep(0)
                    worker = random.choice(workers.running)
                    if victim != "broker":
                        await workers.kill(worker)
                    if victim != "worker":
                        outages.append(await kill_broker(server))
                    if victim != "broker":  # another worker of its style replaces it
                        await workers.start(worker.style)
                await workers.work_on(DONE_MIN)
                await publisher.end()
                await workers.wait_for(lambda: workers.done >= publisher.stored.keys())
                await all_settled(server.url)
                await workers.stop()
            finally:
                await publisher.discard()
                await workers.discard()
            await server.stop()
        assert "Traceback" not in server.stderr, server.stderr
        check_everything_was_done(workers, publisher.stored)
        check_stored_acks_hold(workers.all)
        check_failures_are_counted(workers)
        if mode == "key_shared":
            check_keys_are_in_order(workers.all)
            check_keys_are_with_one_at_a_time(workers.all, outages)

    asyncio.run(scenario())
