"""A real server that gets SIGTERM while consumers work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runnel.client import connect
from tests.server.load import SMALL
from tests.server.server_process import running_server
from tests.server.test_sigterm import DRAINING, end_in_time
from tests.server.test_work_kill import all_settled
from tests.server.worker_events import WorkBegun, now_ns
from tests.server.worker_processes import (
    STYLES,
    Outage,
    WorkerProcesses,
    WorkPublisher,
    check_everything_was_done,
    check_keys_are_in_order,
    check_keys_are_with_one_at_a_time,
    check_stored_acks_hold,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MESSAGES = 2000


def test_sigterm_under_consumers_loses_nothing_and_counts_nothing_as_failed(tmp_path: Path) -> None:
    async def scenario() -> None:
        outages: list[Outage] = []
        async with running_server(tmp_path, *SMALL, DRAINING) as server:
            workers = WorkerProcesses(server.url, "key_shared", seed=7)
            publisher = WorkPublisher(server.url, 7, workers)
            try:
                for style in STYLES:
                    await workers.start(style)
                publisher.start()
                for messages in (300, 600):
                    await workers.work_on(messages)
                    begin_ns = now_ns()
                    await end_in_time(server)
                    await server.start()
                    outages.append(Outage(begin_ns, now_ns()))
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
        check_keys_are_in_order(workers.all)
        check_keys_are_with_one_at_a_time(workers.all, outages)
        begun = [event for worker in workers.all for event in worker.events]
        assert not [event for event in begun if isinstance(event, WorkBegun) and event.failures]

    asyncio.run(scenario())


def test_sigterm_stores_the_acks_that_have_come_and_consumers_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            running_server(tmp_path, DRAINING) as server,
            connect(server.url) as bus,
            bus.consume("s", "a", window_messages=MESSAGES) as consumer,
        ):
            async with bus.publisher("a") as publisher:
                for number in range(MESSAGES):
                    publisher.send(b"%d" % number)
            works = [await anext(consumer) for _ in range(MESSAGES)]
            for work in works[::2]:
                await work.ack()
            await bus.ping()  # the broker has the acks, and nothing waits for them
            await end_in_time(server)
            await server.start()
            again = [await anext(consumer) for _ in range(MESSAGES // 2)]
            assert [work.offset for work in again] == [work.offset for work in works[1::2]]
            assert all(work.failures == 0 for work in again)
            await consumer.ack(*again, stored=True)
            assert (await bus.subscription("s")).members[0].backlog == 0
            await server.stop()

    asyncio.run(scenario())
