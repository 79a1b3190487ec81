"""The layout of a data directory. All of its paths are built here.

    runnel.json                      format version
    lock                             held by the process that writes
    synced                           how far the newest file of each folder has been synced
    synced.<name>                    the same, by one of several logs that serve the directory
    checkpoint/                      all of this as of one moment, while a backup is made
    cluster.sqlite                   instead of `metadata/`, once several brokers have served it; and owners of shards
    metadata/00000000000000000007    what belongs to no shard; the newest file is the one in use
    nodes/<name>/lock                held by each of several logs that serve the directory
    journals/<journal>/name          the journal's real name
    journals/<journal>/shards        its number of shards, unless it has one
    journals/<journal>/<shard>/00000000000000000001-0.segment    number and generation
    journals/<journal>/<shard>/00000000000000000001-0.index
    journals/<journal>/<shard>/lock                              held by the log that serves it, where there are several
    journals/<journal>/<shard>/losses                            the shard's losses, if there are any
    journals/<journal>/<shard>/catalogue/00000000000000000002    offsets, producers, last values; the newest is in use
    journals/<journal>/<shard>/state/00000000000000000003        progress of subscriptions; the newest is in use

Format 1 had one catalogue for the directory, in `catalogue/`, instead of the metadata and the shards' catalogues.

A journal's folder is its name with every character outside a-z 0-9 _ - written as %XX of its UTF-8 bytes, so that no
two names collide, even on file systems that fold case. A long name is cut, and ends in ~ and a hash of the whole name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from xxhash import xxh3_128_hexdigest

FORMAT_FILE: Final = "runnel.json"
LOCK_FILE: Final = "lock"
MARKS_FILE: Final = "synced"
METADATA: Final = "metadata"
NODES: Final = "nodes"
CLUSTER_FILE: Final = "cluster.sqlite"
CATALOGUE: Final = "catalogue"
JOURNALS: Final = "journals"
CHECKPOINT: Final = "checkpoint"
NAME_FILE: Final = "name"
SHARDS_FILE: Final = "shards"
STATE: Final = "state"
LOSSES_FILE: Final = "losses"
SEGMENT_SUFFIX: Final = ".segment"
INDEX_SUFFIX: Final = ".index"
# The suffix of files being written. A crash leaves them; opening removes them.
UNFINISHED_SUFFIX: Final = ".new"
# Names that a data directory may hold before it has a format file: Runnel's own, and those that a file system puts into
# an empty volume. Settings and tokens may be made before the broker's first start.
_OUR_NAMES: Final = frozenset(
    (
        FORMAT_FILE,
        LOCK_FILE,
        MARKS_FILE,
        CHECKPOINT,
        METADATA,
        CLUSTER_FILE,
        NODES,
        CATALOGUE,
        JOURNALS,
        "runnel.toml",
        "lost+found",
    )
)
_TOKENS_FILE: Final = "tokens.json"

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789_-")
_FOLDER_CHARACTERS_MAX: Final = 120
_SEGMENT_NAME: Final = re.compile(r"(\d{20})-(\d{1,9})\.segment")


def folder_name(journal: str) -> str:
    encoded = journal.encode()
    escaped = "".join([chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in encoded])
    if len(escaped) <= _FOLDER_CHARACTERS_MAX:
        return escaped
    return f"{escaped[: _FOLDER_CHARACTERS_MAX - 33]}~{xxh3_128_hexdigest(encoded)}"


def journal_name(folder: str) -> str:
    """The journal name that a folder was made from; for a cut name, only its beginning."""
    return unquote(folder.rpartition("~")[0] or folder)


def journal_folder(directory: str, journal: str) -> str:
    return f"{directory}/{JOURNALS}/{folder_name(journal)}"


def shard_folder(directory: str, journal: str, shard: int) -> str:
    return f"{journal_folder(directory, journal)}/{shard}"


def state_folder(shard_folder: str) -> str:
    """The folder of a shard's state journal, which records the progress of subscriptions."""
    return f"{shard_folder}/{STATE}"


def catalogue_folder(shard_folder: str) -> str:
    """The folder of a shard's catalogue."""
    return f"{shard_folder}/{CATALOGUE}"


def marks_file(member: str) -> str:
    """The file of marks of a log that has the directory for itself, or of one of several."""
    return f"{MARKS_FILE}.{folder_name(member)}" if member else MARKS_FILE


def node_folder(directory: str, member: str) -> str:
    """The folder of one of several logs that serve the directory; its lock lies there."""
    return f"{directory}/{NODES}/{folder_name(member)}"


def is_cluster_file(name: str) -> bool:
    """Whether a file in the data directory is `cluster.sqlite`, or belongs to it."""
    return name.startswith(CLUSTER_FILE)


def is_marks_file(name: str) -> bool:
    return name == MARKS_FILE or (
        name.startswith(f"{MARKS_FILE}.") and not name.endswith(UNFINISHED_SUFFIX)
    )


def foreign_names(names: Sequence[str]) -> list[str]:
    """The names, in a directory without a format file, that are not Runnel's."""
    return [
        name
        for name in names
        if name.removesuffix(UNFINISHED_SUFFIX) not in _OUR_NAMES
        and not name.startswith((_TOKENS_FILE, f"{MARKS_FILE}.", f"{CLUSTER_FILE}-"))
    ]


def segment_path(folder: str, number: int, generation: int) -> str:
    return f"{folder}/{segment_name(number, generation)}"


def segment_name(number: int, generation: int) -> str:
    return f"{number:020d}-{generation}{SEGMENT_SUFFIX}"


def index_path(segment: str) -> str:
    """The index beside a segment's file."""
    return segment.removesuffix(SEGMENT_SUFFIX) + INDEX_SUFFIX


def segment_of_index(name: str) -> str:
    """The name of the segment that an index's file name belongs to."""
    return name.removesuffix(INDEX_SUFFIX) + SEGMENT_SUFFIX


def orphaned_indexes(names: Sequence[str]) -> list[str]:
    """The indexes among these names whose number no segment of any generation has.

    Runnel removes a segment after its index, so the segment of such an index was lost.
    """
    segments = [numbered for name in names if (numbered := segment_number(name)) is not None]
    numbers = {number for number, _ in segments}
    return [
        name
        for name in names
        if name.endswith(INDEX_SUFFIX)
        and (numbered := segment_number(segment_of_index(name))) is not None
        and numbered[0] not in numbers
    ]


def segment_number(name: str) -> tuple[int, int] | None:
    """The number and generation in a segment's file name; None for any other file."""
    match = _SEGMENT_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
