"""Publish and subscribe in ten lines. Needs a broker: `runnel serve`.

python examples/publish_subscribe.py [URL]
"""

import asyncio
import sys

import runnel


async def main() -> None:
    async with runnel.connect(*sys.argv[1:]) as bus, bus.subscribe("sensors/*") as readings:
        await bus.publish("sensors/a", b"21.5", key=b"a", tags={"unit": "C"})
        await bus.publish("sensors/b", b"1013", key=b"b", tags={"unit": "hPa"})
        async for message in readings:
            print(message.topic, message.offset, message.payload.decode(), message.tags["unit"])
            if message.topic == "sensors/b":
                break


asyncio.run(main())
