"""What must outlive segments, written down: topics, next offsets, producers, last values, cursors.

The catalogue is a file of records. Everything in it is kept in memory by its owner; the file is only read at start.
When it has grown, a new file is begun with a snapshot, synced and renamed into place, and the old one removed: at
every moment one whole file is there. Records may be applied twice without harm: they state values, not changes.

A snapshot is made from the owner's memory, so memory has to follow the file in step: `apply` is called when a record is
stored and before the next one is written. What a snapshot finds is then what the file said before this write; the
records of this write stand behind it in the new file.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from runnel.config import Keep
from runnel.errors import DiskFullError, MalformedError, ReadOnlyError, Unavailable
from runnel.log import paths
from runnel.log.log import Cursor
from runnel.log.producers import ProducerState
from runnel.log.records import RecordFile, read_records
from runnel.log.scan import Damage, Scanned
from runnel.world.disk import Access, Disk
from runnel.world.workers import Workers


class _Record(msgspec.Struct, array_like=True, frozen=True, tag=True):
    pass


class TopicMade(_Record, tag="topic", frozen=True):
    name: str
    keep: Keep
    partitions: int
    journal: str


class TopicDeleted(_Record, tag="deleted", frozen=True):
    name: str


class PartitionAt(_Record, tag="partition", frozen=True):
    """A partition's next offset, and below which offset its messages are hidden."""

    topic: str
    partition: int
    next_offset: int
    floor: int


class Opened(_Record, tag="opened", frozen=True):
    """A term of ownership began: everything appended in it carries this epoch."""

    epoch: int
    time_ns: int


class Closed(_Record, tag="closed", frozen=True):
    """The term ended in good order: segments and their indexes are complete."""

    epoch: int


class ShardAt(_Record, tag="shard", frozen=True):
    """A shard as of the end of one of its segments."""

    journal: str
    shard: int
    next_entry: int
    last_time_ns: int
    offsets: list[tuple[str, int, int]]  # topic, partition, next offset
    producers: list[ProducerState]


class CursorSet(_Record, tag="cursor", frozen=True):
    cursor: Cursor


class CursorRemoved(_Record, tag="uncursor", frozen=True):
    name: str


class LastValue(_Record, tag="last", frozen=True):
    """The last message of a partition, whose segment retention removes; an empty block: none."""

    topic: str
    partition: int
    block: bytes


Record = (
    TopicMade
    | TopicDeleted
    | PartitionAt
    | Opened
    | Closed
    | ShardAt
    | CursorSet
    | CursorRemoved
    | LastValue
)

MakeRecords = Callable[[], Sequence[Record]]
Apply = Callable[[], None]

# A flipped bit in a snapshot costs so many of its records, not all of them.
_RECORDS_TOGETHER: Final = 256

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Record])


class Loaded(msgspec.Struct, frozen=True):
    records: Sequence[Record]
    damage: Sequence[Damage]
    torn: Damage | None


class Catalogue:
    """The file in use, and a queue before it: what is added while one write runs shares the next."""

    def __init__(
        self,
        disk: Disk,
        workers: Workers,
        folder: str,
        *,
        bytes_max: int,
        snapshot: MakeRecords,
    ) -> None:
        self._disk = disk
        self._workers = workers
        self._folder = folder
        self._bytes_max = bytes_max
        self._snapshot = snapshot
        self._snapshot_bytes = 0
        self._number = 0
        self._file: RecordFile | None = None
        self._queue: list[tuple[MakeRecords, Apply | None, asyncio.Future[None]]] = []
        self._is_writing = False
        self._at_rest: asyncio.Future[None] | None = None  # somebody waits for the last write
        self._is_closed = False
        self._broken: str | None = None  # nobody knows what the disk holds: nothing more is written

    # --- Opening and closing: blocking, for a worker ---

    def open(self) -> Loaded:
        """Read the newest whole file; remove what a crash left of others."""
        self._disk.make_directory(self._folder)
        names = self._disk.list(self._folder)
        numbers = sorted(int(name) for name in names if name.isdecimal())
        # Whoever named the newest may have been killed before it made the name durable.
        self._disk.sync_directory(self._folder)
        for name in names:
            if not name.isdecimal() or int(name) != (numbers[-1] if numbers else 0):
                self._disk.remove(f"{self._folder}/{name}")
        if not numbers:
            self._begin_file(())
            return Loaded((), (), None)
        self._number = numbers[-1]
        self._file, contents, scanned = RecordFile.recover(self._disk, self._path(self._number))
        self._snapshot_bytes = self._file.end
        return _decode(contents, scanned, self._path(self._number))

    def renew(self) -> None:
        """Leave a damaged file behind: what is known now begins a new one."""
        self._begin_file(self._snapshot())

    def _begin_file(self, records: Sequence[Record]) -> None:
        """Go on in a new file. If that fails, the old one is as good as before, or this is broken."""
        number = self._number + 1
        unfinished = self._path(number) + paths.UNFINISHED_SUFFIX
        if unfinished.rpartition("/")[2] in self._disk.list(self._folder):
            self._disk.remove(unfinished)
        file = RecordFile.create(self._disk, unfinished)
        try:
            for begin in range(0, max(len(records), 1), _RECORDS_TOGETHER):
                file.append(_encoder.encode(records[begin : begin + _RECORDS_TOGETHER]))
        finally:
            file.close()
        former, former_number = self._file, self._number
        try:
            self._disk.rename(unfinished, self._path(number))
            self._disk.sync_directory(self._folder)
            self._file, _, _ = RecordFile.recover(self._disk, self._path(number))
        except OSError:
            self._withdraw(number)
            raise
        self._number = number
        self._snapshot_bytes = self._file.end
        if former is not None:
            former.close()
            self._disk.remove(self._path(former_number))

    def _withdraw(self, number: int) -> None:
        """A new file may have its name by now: a restart would take it for the one in use."""
        try:
            with suppress(FileNotFoundError):
                self._disk.remove(self._path(number))
            self._disk.sync_directory(self._folder)
        except OSError as error:
            self._broken = f"the catalogue is read-only until restart: {error}"

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:020d}"

    # --- Adding ---

    def add(self, *records: Record, apply: Apply | None = None) -> asyncio.Future[None]:
        """Write records down; the future is done once they are stored and applied."""
        return self.add_made(lambda: records, apply)

    def add_made(self, make: MakeRecords, apply: Apply | None = None) -> asyncio.Future[None]:
        """The same for records that a worker makes, because making them takes a while."""
        future = asyncio.get_running_loop().create_future()
        if self._broken is not None or self._is_closed:
            future.set_exception(ReadOnlyError(self._broken or "the catalogue is closed"))
            return future
        self._queue.append((make, apply, future))
        if not self._is_writing:
            self._is_writing = True
            asyncio.get_running_loop().call_soon(self._write_next)
        return future

    def _write_next(self) -> None:
        group, self._queue = self._queue, []
        if not group:
            self._is_writing = False
            if self._at_rest is not None:
                self._at_rest.set_result(None)
            return
        written = self._workers.submit(self._write, [make for make, _, _ in group])
        written.add_done_callback(
            lambda done: self._written(done, [(apply, future) for _, apply, future in group])
        )

    def _write(self, makers: Iterable[MakeRecords]) -> None:
        assert self._file is not None
        if self._broken is not None:
            raise ReadOnlyError(self._broken)
        records = [record for make in makers for record in make()]
        try:
            self._file.append(_encoder.encode(records))
        except OSError:
            self._file.cut_back()
            raise
        if self._file.end > self._snapshot_bytes + self._bytes_max:
            try:
                self._begin_file([*self._snapshot(), *records])
            except OSError:
                # The records are safe in the old file, which goes on; try again when it has doubled.
                self._snapshot_bytes = self._file.end

    def _written(
        self, done: asyncio.Future[None], waiting: list[tuple[Apply | None, asyncio.Future[None]]]
    ) -> None:
        error = done.exception()
        failure = self._judge(error) if isinstance(error, OSError) else error
        for apply, future in waiting:
            if apply is not None and failure is None:
                apply()
            if future.cancelled():
                continue
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)
                future.exception()  # seen: whoever still waits gets it, and nobody need
        self._write_next()

    def _judge(self, error: OSError) -> Unavailable:
        if isinstance(error.__context__, OSError):  # cutting the failed record off has failed too
            self._broken = f"the catalogue is read-only until restart: {error}"
            return ReadOnlyError(self._broken)
        return DiskFullError(f"the catalogue could not be written: {error}")

    async def close(self, *records: Record) -> None:
        """Write these last, then let go of the file. Nothing may be added any more."""
        last = self.add(*records) if records else None
        self._is_closed = True
        try:
            if self._is_writing:
                self._at_rest = asyncio.get_running_loop().create_future()
                await self._at_rest
            if last is not None:
                await last
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close the file without writing anything."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_newest(disk: Disk, folder: str) -> Loaded:
    """The newest file as it stands, for readers beside the owner. Blocks, and changes nothing.

    FileNotFoundError if there is none, or if a newer one replaced it just now.
    """
    numbers = [int(name) for name in disk.list(folder) if name.isdecimal()]
    if not numbers:
        raise FileNotFoundError(errno.ENOENT, "no catalogue", folder)
    path = f"{folder}/{max(numbers):020d}"
    file = disk.open(path, Access.READ)
    try:
        contents, scanned = read_records(file)
    finally:
        file.close()
    return _decode(contents, scanned, path)


def _decode(contents: Sequence[bytes], scanned: Scanned, path: str) -> Loaded:
    records: list[Record] = []
    damage = list(scanned.damage)
    for content in contents:
        try:
            records += _decoder.decode(content)
        except (msgspec.DecodeError, MalformedError) as error:
            damage.append(Damage(path, 0, len(content), f"a record cannot be read: {error}"))
    return Loaded(records, damage, scanned.torn)
