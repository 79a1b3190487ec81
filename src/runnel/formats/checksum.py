"""The checksum of every byte stored or sent: CRC-32C (Castagnoli). Only this module names the library.

`crc32c(more, crc32c(data))` is the checksum of `data` followed by `more`.
"""

from __future__ import annotations

from fastcrc.crc32 import iscsi as crc32c

# The library's function without a wrapper: for a header of 20 bytes it costs less than a call in Python.
# It reads any buffer in place. From 16 KiB on other threads run meanwhile: they must not write to the buffer.
__all__ = ["crc32c"]
