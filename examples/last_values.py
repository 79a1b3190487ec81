"""A dashboard that is switched on late: the last known value of every sensor, then what comes, without a gap.

python examples/last_values.py [URL]
"""

import asyncio
import sys

import runnel


async def main() -> None:
    async with runnel.connect(*sys.argv[1:]) as bus:
        for degrees in (19.0, 20.5, 22.0):
            await bus.publish("house/kitchen", b"%.1f" % degrees)
            await bus.publish("house/cellar", b"%.1f" % (degrees - 8))
        shown: dict[str, bytes] = {}
        async with bus.subscribe("house/*", start="last") as readings:
            async for message in readings:
                shown[message.topic] = message.payload
                print({topic: shown[topic].decode() for topic in sorted(shown)})
                if message.payload == b"22.0":
                    await bus.publish("house/kitchen", b"23.5")
                elif message.payload == b"23.5":
                    break


asyncio.run(main())
