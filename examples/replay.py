"""Read what was stored, again and again: by offset, by time, and with a named cursor that the broker remembers.

python examples/replay.py [URL]
"""

import asyncio
import sys
from datetime import UTC, datetime, timedelta

import runnel


async def main() -> None:
    async with runnel.connect(*sys.argv[1:]) as bus:
        # With a name, what a lost connection left open is sent again and stored once.
        async with bus.publisher("orders", name="shop") as publisher:
            for number in range(1, 1001):
                publisher.send(b"order %d" % number)

        page = await bus.fetch("orders", 991)  # offsets are 1, 2, 3 …
        print(page.messages[0].payload.decode(), "to", page.messages[-1].payload.decode())

        recent = await bus.fetch("orders", time=datetime.now(UTC) - timedelta(minutes=5))
        print(len(recent), "in the last five minutes, first offset", recent.messages[0].offset)

        # A cursor is a place with a name. It also keeps retention from removing what was not read.
        await bus.set_cursor("billing", {"orders": 1})
        while (cursor := await bus.cursor("billing")) and cursor.places[0].lag:
            page = await bus.fetch("orders", cursor.places[0].offset, messages_max=400)
            await bus.set_cursor("billing", {"orders": page.next_offset})
            print("billed", len(page), "orders, next is", page.next_offset)


asyncio.run(main())
