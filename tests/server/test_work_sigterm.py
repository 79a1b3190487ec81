"""A real server that is told to end while consumers are at work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from runnel.client import connect
from tests.server.load import SMALL
from tests.server.notes import Begun, now_ns
from tests.server.serving import serving
from tests.server.test_sigterm import DRAINING, end_in_time
from tests.server.test_work_kill import all_settled
from tests.server.workforce import (
    STYLES,
    Feed,
    Outage,
    Workforce,
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
        async with serving(tmp_path, *SMALL, DRAINING) as server:
            workforce = Workforce(server.url, "key_shared", seed=7)
            feed = Feed(server.url, 7, workforce)
            try:
                for style in STYLES:
                    await workforce.start(style)
                feed.start()
                for messages in (300, 600):
                    await workforce.work_on(messages)
                    begin_ns = now_ns()
                    await end_in_time(server)
                    await server.start()
                    outages.append(Outage(begin_ns, now_ns()))
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
        check_keys_are_in_order(workforce.workers)
        check_keys_are_with_one_at_a_time(workforce.workers, outages)
        begun = [note for worker in workforce.workers for note in worker.notes]
        assert not [note for note in begun if isinstance(note, Begun) and note.failures]

    asyncio.run(scenario())


def test_sigterm_stores_the_acks_that_have_come_and_consumers_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            serving(tmp_path, DRAINING) as server,
            connect(server.url) as bus,
            bus.consume("s", "a", window_messages=MESSAGES) as consumer,
        ):
            async with bus.publisher("a") as publisher:
                for number in range(MESSAGES):
                    publisher.send(b"%d" % number)
            works = [await anext(consumer) for _ in range(MESSAGES)]
            for work in works[::2]:
                await work.ack()
            await bus.ping()  # they have come, and are not waited for
            await end_in_time(server)
            await server.start()
            again = [await anext(consumer) for _ in range(MESSAGES // 2)]
            assert [work.offset for work in again] == [work.offset for work in works[1::2]]
            assert all(work.failures == 0 for work in again)
            await consumer.ack(*again, stored=True)
            assert (await bus.subscription("s")).members[0].backlog == 0
            await server.stop()

    asyncio.run(scenario())
