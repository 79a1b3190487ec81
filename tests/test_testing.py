"""What `runnel.testing` gives to tests of programs: a broker in a thread, and a clock that only the test moves."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from runnel.config import Retain, Settings, TopicRule
from runnel.errors import ClientFault, OffsetGoneError
from runnel.testing import BrokerThread, VirtualClock, open_broker

AGED = Settings(topics=(TopicRule(match="aged", retain=Retain(age_ns=60 * 10**9)),))


def test_fixture_gives_a_broker_to_programs_without_a_loop(runnel_broker: BrokerThread) -> None:
    with runnel_broker.connect_blocking(name="test") as bus:
        bus.publish("orders", b"1")
        assert [message.payload for message in bus.fetch("orders").messages] == [b"1"]


def test_fixture_gives_a_broker_to_programs_with_a_loop(runnel_broker: BrokerThread) -> None:
    async def program() -> None:
        async with (
            runnel_broker.connect() as bus,
            bus.subscribe("*", start="earliest") as subscription,
        ):
            await bus.publish("orders", b"1")
            assert (await anext(subscription)).payload == b"1"

    asyncio.run(program())


def test_fixture_is_new_for_every_test(runnel_broker: BrokerThread) -> None:
    with runnel_broker.connect_blocking() as bus:
        assert bus.topics() == []


class TestWithSettings:
    @pytest.fixture
    def runnel_settings(self) -> Settings:
        return AGED

    def test_settings_can_be_overridden_and_retention_obeys_the_clock(
        self, runnel_broker: BrokerThread
    ) -> None:
        with runnel_broker.connect_blocking() as bus:
            bus.publish("aged", b"1")
            runnel_broker.advance(59)
            assert len(bus.fetch("aged", 1)) == 1
            runnel_broker.advance(2)
            with pytest.raises(OffsetGoneError):
                bus.fetch("aged", 1)


def test_broker_that_cannot_be_opened_says_so_in_the_test() -> None:
    clash = Settings(topics=(TopicRule(match="a", journal="live"),))
    broker = BrokerThread(clash)
    with pytest.raises(ClientFault, match="live"):
        broker.start()
    broker.stop()


def test_time_of_broker_and_clients_stands_still() -> None:
    async def program() -> None:
        clock = VirtualClock()
        async with open_broker(clock=clock) as broker, broker.connect() as bus:
            first = await bus.publish("a", b"1")
            clock.advance(5)
            second = await bus.publish("a", b"2")
            assert second.receive_time_ns - first.receive_time_ns == 5
            messages = (await bus.fetch("a")).messages
            assert [m.event_time_ns for m in messages] == [m.receive_time_ns for m in messages]
            assert await bus.ping() == 0

    asyncio.run(program())


def test_waiting_ends_by_the_clock() -> None:
    async def program() -> None:
        clock = VirtualClock()
        async with open_broker(clock=clock) as broker, broker.connect() as bus:
            await bus.publish("a", b"1")
            waiting = asyncio.ensure_future(bus.fetch("a", 2, wait_s=10))
            for _ in range(10):
                await bus.ping()
            assert not waiting.done()
            clock.advance(11 * 10**9)
            assert (await waiting).messages == []

    asyncio.run(program())


def test_every_pytest_run_can_afford_the_plugin() -> None:
    program = (
        "import sys, runnel.testing.plugin\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in "
        "('runnel', 'numpy', 'msgspec', 'uvloop', 'asyncio', 'structlog')))"
    )
    with_pytest = "import pytest\n" + program
    told = subprocess.run(
        [sys.executable, "-c", with_pytest], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert told == "['runnel', 'runnel.testing', 'runnel.testing.plugin']\n"
