"""Decodes the blocks of bytes that the broker delivers into batches and messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message

# A block may be large, and a slow client keeps message objects alive: only a few are made at a time.
_SLICE_ROWS_MAX: Final = 256
_SLICE_BYTES: Final = 64 * 1024  # approximate: assumes messages of the same size


class Blocks:
    """The blocks of one delivery, one after the other. It keeps only a copy of their bytes."""

    def __init__(self, buffers: Sequence[bytes | memoryview]) -> None:
        self._data = memoryview(b"".join(buffers))
        self._position = 0

    @property
    def is_over(self) -> bool:
        return self._position >= len(self._data)

    async def next(self) -> Batch:
        """The next block, uncompressed. Decompressing takes a while, so it happens off the loop."""
        envelope, body, length = block.unpack(self._data, self._position)
        self._position += length
        if self.is_over:
            self._data, self._position = memoryview(b""), 0
        batch = Batch(envelope, body)
        if envelope.codec != Codec.NONE:
            batch = await asyncio.to_thread(batch.uncompressed)
        return batch


def messages_of(batch: Batch) -> Iterator[Message]:
    """The messages of a batch. Only a few of them are objects at a time."""
    count = len(batch)
    rows = min(_SLICE_ROWS_MAX, count * _SLICE_BYTES // max(1, batch.envelope.body_bytes)) or 1
    return chain.from_iterable(
        batch.slice(begin, min(begin + rows, count)).messages() for begin in range(0, count, rows)
    )
