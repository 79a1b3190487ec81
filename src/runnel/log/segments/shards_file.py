"""The file `shards` in a journal's folder: its number of shards, in case the catalogue loses the record of it.

    4 e28911027fcf803f      the number in decimal digits, and the XXH3-64 of these digits

A journal with one shard has no such file.
"""

from __future__ import annotations

import re
from typing import Final

from xxhash import xxh3_64_hexdigest

from runnel.log.segments import paths
from runnel.log.segments.segments import write_whole
from runnel.platform.disk import Disk, FileAccess
from runnel.topics.partitions import SHARDS_MAX

_CONTENT: Final = re.compile(rb"([1-9][0-9]{0,3}) ([0-9a-f]{16})\n")
_READ_BYTES: Final = 64  # more than it ever has


def write_shards(disk: Disk, journal_folder: str, shards: int, *, member: str = "") -> None:
    """Write the file: see `write_whole`."""
    digits = b"%d" % shards
    content = b"%b %b\n" % (digits, xxh3_64_hexdigest(digits).encode())
    write_whole(disk, f"{journal_folder}/{paths.SHARDS_FILE}", content, member=member)


def read_shards(disk: Disk, journal_folder: str) -> int | None:
    """The number of shards; None if there is no file, or it is damaged."""
    try:
        file = disk.open(f"{journal_folder}/{paths.SHARDS_FILE}", FileAccess.READ)
    except FileNotFoundError:
        return None
    try:
        content = file.read(0, _READ_BYTES)
    finally:
        file.close()
    found = _CONTENT.fullmatch(content)
    if found is None or xxh3_64_hexdigest(found[1]) != found[2].decode():
        return None
    return shards if (shards := int(found[1])) <= SHARDS_MAX else None
