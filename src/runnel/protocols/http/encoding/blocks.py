"""What the broker delivers as blocks of bytes, turned into batches whose messages can be looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from runnel.formats import block
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message

# Messages are objects for as long as somebody may take to read them: a few at a time, of a block that may be large.
_SLICE_ROWS_MAX: Final = 256
_SLICE_BYTES: Final = 64 * 1024  # about: of messages as large as the others


class Blocks:
    """The blocks of one delivery, one after the other. It keeps nothing but a copy of their bytes."""

    def __init__(self, buffers: Sequence[bytes | memoryview]) -> None:
        self._data = memoryview(b"".join(buffers))
        self._position = 0

    @property
    def is_over(self) -> bool:
        return self._position >= len(self._data)

    async def next(self) -> Batch:
        """The next one, uncompressed. That takes a while where it is compressed: off the loop, then."""
        envelope, body, length = block.unpack(self._data, self._position)
        self._position += length
        if self.is_over:
            self._data, self._position = memoryview(b""), 0
        batch = Batch(envelope, body)
        if envelope.codec != Codec.NONE:
            batch = await asyncio.to_thread(batch.uncompressed)
        return batch


def messages_of(batch: Batch) -> Iterator[Message]:
    """The messages of a batch, of which only a few are objects at a time."""
    count = len(batch)
    rows = min(_SLICE_ROWS_MAX, count * _SLICE_BYTES // max(1, batch.envelope.body_bytes)) or 1
    return chain.from_iterable(
        batch.slice(begin, min(begin + rows, count)).messages() for begin in range(0, count, rows)
    )
