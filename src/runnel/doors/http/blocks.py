"""What the broker delivers as blocks of bytes, turned into batches whose messages can be looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec


async def batches_of(buffers: Sequence[bytes | memoryview]) -> list[Batch]:
    """The batches of a delivery, uncompressed. That takes a while where they are compressed: off the loop, then."""
    data = memoryview(b"".join(buffers))
    batches = []
    position = 0
    while position < len(data):
        envelope, body, length = block.unpack(data, position)
        batch = Batch(envelope, body)
        if envelope.codec != Codec.NONE:
            batch = await asyncio.to_thread(batch.uncompressed)
        batches.append(batch)
        position += length
    return batches
