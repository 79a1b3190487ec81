"""The checksum of every byte stored or sent: CRC-32C (Castagnoli). Which library computes it is said here alone.

`crc32c(data)` begins anew; `crc32c(more, crc32c(data))` is the checksum of both, one behind the other.
"""

from __future__ import annotations

from fastcrc.crc32 import iscsi as crc32c

# The library's own function, not one around it: for a header of 20 bytes a call of it costs less than a call in Python.
# Any buffer is read where it lies. From 16 KiB on other threads run meanwhile: they must not write to it.
__all__ = ["crc32c"]
