"""Patterns of MQTT and NATS that match nothing: the client warns, once, with the glob that was meant."""

from __future__ import annotations

import logging

import pytest

from runnel.embedded import Broker
from tests.client.running import in_both_loops

HINT = (
    "warning: pattern 'sensors/#': no topic has this name, and # stands for itself in a pattern; "
    "did you mean 'sensors/*'?"
)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records if line.name == "runnel.client"]


def test_subscription_by_a_pattern_of_mqtt_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @in_both_loops
    async def scenario() -> None:
        caplog.clear()
        async with Broker.open("memory:") as broker, broker.connect() as bus:
            await bus.publish("sensors/a", b"x")
            for _ in range(2):
                async with bus.subscribe("sensors/#", "sensors/*"):
                    pass
        assert told(caplog) == [HINT]

    caplog.set_level(logging.WARNING, "runnel.client")
    scenario()


def test_consumer_by_such_a_pattern_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    @in_both_loops
    async def scenario() -> None:
        caplog.clear()
        async with (
            Broker.open("memory:") as broker,
            broker.connect() as bus,
            bus.consume("work", "sensors/#"),
        ):
            pass
        assert told(caplog) == [HINT]

    caplog.set_level(logging.WARNING, "runnel.client")
    scenario()


def test_subscription_made_of_such_a_pattern_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    @in_both_loops
    async def scenario() -> None:
        caplog.clear()
        async with Broker.open("memory:") as broker, broker.connect() as bus:
            await bus.make_subscription("work", "sensors/#")
        assert told(caplog) == [HINT]

    caplog.set_level(logging.WARNING, "runnel.client")
    scenario()


def test_pattern_that_is_the_name_of_a_topic_is_none_to_warn_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @in_both_loops
    async def scenario() -> None:
        caplog.clear()
        async with Broker.open("memory:") as broker, broker.connect() as bus:
            await bus.publish("sensors/#", b"x")
            async with bus.subscribe("sensors/#", start="earliest") as subscription:
                assert (await anext(subscription)).payload == b"x"
        assert told(caplog) == []

    caplog.set_level(logging.WARNING, "runnel.client")
    scenario()
