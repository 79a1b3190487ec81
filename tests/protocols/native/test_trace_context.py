"""W3C trace context passes the native listener in tags, whichever way a message is read."""

from __future__ import annotations

import asyncio

import runnel

TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7",
}


def test_trace_context_survives_publishing_and_every_way_of_reading() -> None:
    async def main() -> None:
        async with (
            runnel.Broker.open("memory:") as broker,
            broker.listen() as url,
            runnel.connect(url) as bus,
        ):
            await bus.publish("a", b"one", tags=TRACE)
            async with bus.publisher("a") as publisher:
                publisher.send(b"two", tags={"unit": "C", **TRACE})
            expected = [TRACE, {"unit": "C", **TRACE}]
            page = await bus.fetch("a", offset=1)
            assert [message.tags for message in page.messages] == expected
            async with bus.subscribe("a", start="earliest") as messages:
                assert [(await anext(messages)).tags for _ in range(2)] == expected
            async with bus.consume("s", "a", mode="shared") as consumer:
                assert [(await anext(consumer)).tags for _ in range(2)] == expected

    asyncio.run(asyncio.wait_for(main(), 30))
