"""A broker inside a program: no process, no socket, the same client. Give it a directory, and it stores there.

python examples/embedded.py [DIRECTORY]
"""

import asyncio
import sys

import runnel


async def main() -> None:
    where = sys.argv[1] if len(sys.argv) > 1 else "memory:"
    async with runnel.Broker.open(where) as broker, broker.connect() as bus:
        receipt = await bus.publish("jobs", b"resize cat.jpg")
        print("offset", receipt.offset, receipt.level)
        async with broker.listen() as url, runnel.connect(url) as guest:  # others may come in, too
            page = await guest.fetch("jobs", receipt.offset)
            print(page.messages[0].payload.decode())


asyncio.run(main())
