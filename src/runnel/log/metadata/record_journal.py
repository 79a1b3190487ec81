"""A small journal of records whose content is also in its owner's memory: written in groups, replaced by snapshots.

The journal is a file of records (`records`). Its owner has the whole content in memory; the file is only read at start.
When the file has grown, a new file is begun with a snapshot, synced and renamed into place, and the old file removed:
one whole file exists at every moment. Records may be applied twice without harm: they state values, not changes. A
synced mark (`synced_marks`) records how far the file has been synced, so that the loss of its tail is noticed.

A snapshot is made from the owner's memory, so memory has to agree with the file, in one of two ways:

- memory follows the file (`Snapshots.IN_WORKER`): `apply` is called when a record is stored and before the next one is
  written. The worker that wrote makes the snapshot at once: it contains what the file said before this write, and the
  records of this write follow it in the new file;
- memory is ahead of the file (`Snapshots.ON_LOOP`): a record is in the owner's memory when it is added. The snapshot is
  made on the loop, between two writes: it contains all stored records, and perhaps queued ones.
"""

from __future__ import annotations

import asyncio
import enum
import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, Generic, TypeVar

import msgspec

from runnel.errors import DiskFullError, MalformedError, ReadOnlyError, Unavailable
from runnel.log.segments import paths
from runnel.log.segments.records import RecordFile, read_records
from runnel.log.segments.scan import Damage, Scanned
from runnel.log.segments.synced_marks import Mark, SyncedMarks, missing_file
from runnel.platform.disk import Disk, FileAccess
from runnel.platform.workers import Workers

# A flipped bit in a snapshot costs at most this many of its records, or this many bytes of them, instead of all.
_RECORDS_TOGETHER: Final = 256
_BYTES_TOGETHER: Final = 16 * 2**20
# The most calls of `add` in one write; later ones go into the write after it.
_ADDS_TOGETHER: Final = 4096

_encoder: Final = msgspec.msgpack.Encoder()

R = TypeVar("R")
Apply = Callable[[], None]


class Snapshots(enum.Enum):
    """Where a snapshot may read the owner's memory; the module's docstring compares both."""

    IN_WORKER = enum.auto()
    ON_LOOP = enum.auto()  # the result may be a generator, which a worker iterates over


class LoadedRecords(msgspec.Struct, Generic[R], frozen=True):
    """The content of a file: its whole records, its damage and its torn tail."""

    records: Sequence[R]
    damage: Sequence[Damage]
    torn: Damage | None


class RecordJournal(Generic[R]):
    """The file in use and its queue. Records added during one write share the next write."""

    def __init__(
        self,
        disk: Disk,
        workers: Workers,
        folder: str,
        decoder: msgspec.msgpack.Decoder[list[R]],
        *,
        marks: SyncedMarks,
        name: str,
        bytes_max: int,
        snapshot: Callable[[], Iterable[R]],
        snapshots: Snapshots = Snapshots.IN_WORKER,
        before_begin: Callable[[], None] = lambda: None,
        keeps_open: bool = True,
        remedy: str = "restart",
    ) -> None:
        """`name` names the journal in errors. `before_begin` is called in a worker before the folder is made.

        `remedy` says in errors what ends the refusals after a failed sync.

        Without `keeps_open` no file stays open between writes: there may be thousands of such journals.
        """
        self._disk = disk
        self._workers = workers
        self._folder = folder
        self._decoder = decoder
        self._marks = marks
        self._name = name
        self._bytes_max = bytes_max
        self._snapshot = snapshot
        self._snapshots = snapshots
        self._before_begin = before_begin
        self._keeps_open = keeps_open
        self._remedy = remedy
        self._snapshot_bytes = 0
        self._is_damaged = False  # the file has damage: the next write replaces it
        self._number = 0
        self._file: RecordFile | None = None
        self._queue: list[tuple[Callable[[], Sequence[R]], Apply | None, asyncio.Future[None]]] = []
        self._is_writing = False
        self._is_paused = False
        self._idle: asyncio.Future[None] | None = None  # a caller waits for the last write
        self._is_closed = False
        self._is_released = False
        # Set when the content of the disk is unknown: then nothing more is written.
        self._broken: str | None = None

    @property
    def is_made(self) -> bool:
        """Whether there is a file, or was one, before it is opened. Blocks."""
        return bool(self._disk.list(self._folder)) or self._marks.get(self._folder) is not None

    # --- Opening and closing: blocking, for a worker ---

    def begin(self, records: Sequence[R]) -> None:
        """Begin a new file with these records, and the folder if it is missing."""
        self._before_begin()
        self._disk.make_directory(self._folder)
        self._begin_file(records)
        self._close_between_writes()

    def open(self) -> LoadedRecords[R]:
        """Read the newest file, or make the first one. Remove other files that a crash left."""
        names = self._disk.list(self._folder)
        numbers = sorted(int(name) for name in names if name.isdecimal())
        if names:
            # The process that named the newest file may have been killed before it made the name durable.
            self._disk.sync_directory(self._folder)
        for name in names:
            if not name.isdecimal() or int(name) != (numbers[-1] if numbers else 0):
                self._disk.remove(f"{self._folder}/{name}")
        mark = self._marks.get(self._folder)
        missing = _find_missing(self._folder, numbers, mark)
        if not numbers:
            if missing is None or self._keeps_open:
                self.begin(())
            # Otherwise the first write begins a file. Until then every start reports the lost file.
            return LoadedRecords((), () if missing is None else (missing,), None)
        self._number = numbers[-1]
        path = _path(self._folder, self._number)
        self._file, contents, scanned = RecordFile.recover(
            self._disk, path, _durable_end(mark, self._number)
        )
        self._snapshot_bytes = self._file.end
        self._marks.note(self._folder, self._number, self._file.end)
        self._close_between_writes()
        loaded = _decode_all(self._decoder, contents, scanned, path, missing)
        self._is_damaged = bool(loaded.damage) and self._snapshots is Snapshots.ON_LOOP
        return loaded

    @property
    def is_broken(self) -> bool:
        """Whether nothing is written any more, because the end of the file on disk is unknown. `renew` mends it."""
        return self._broken is not None and not self._is_closed

    def renew(self) -> None:
        """Replace a damaged file, or one whose end is unknown, by a new one that begins with a snapshot."""
        self.begin(list(self._snapshot()))
        self._broken = None

    def _begin_file(self, records: Sequence[R]) -> None:
        """Continue in a new file. If that fails, the old file is still in use, or the journal is broken."""
        mark = self._marks.get(self._folder)
        number = max(self._number, mark.number if mark else 0) + 1
        unfinished = _path(self._folder, number) + paths.UNFINISHED_SUFFIX
        if unfinished.rpartition("/")[2] in self._disk.list(self._folder):
            self._disk.remove(unfinished)
        file = RecordFile.create(self._disk, unfinished)
        try:
            for content in self._contents(records):
                file.append(content)
        finally:
            file.close()
        former, former_number = self._file, self._number
        try:
            self._disk.rename(unfinished, _path(self._folder, number))
            self._disk.sync_directory(self._folder)
            self._file, _, _ = RecordFile.recover(self._disk, _path(self._folder, number))
        except OSError:
            self._withdraw(number)
            raise
        self._number = number
        self._snapshot_bytes = self._file.end
        self._is_damaged = False
        self._marks.note(self._folder, number, self._file.end)
        if former is not None:
            former.close()
            with suppress(FileNotFoundError):
                self._disk.remove(_path(self._folder, former_number))

    def _contents(self, records: Sequence[R]) -> Iterator[bytes]:
        for begin in range(0, max(len(records), 1), _RECORDS_TOGETHER):
            yield from self._halves(records[begin : begin + _RECORDS_TOGETHER])

    def _halves(self, records: Sequence[R]) -> Iterator[bytes]:
        content = _encoder.encode(records)
        if len(content) <= _BYTES_TOGETHER or len(records) == 1:
            yield content
        else:
            half = len(records) // 2
            yield from self._halves(records[:half])
            yield from self._halves(records[half:])

    def _withdraw(self, number: int) -> None:
        """Remove a failed new file, which may have its final name: a restart would take it for the file in use."""
        try:
            with suppress(FileNotFoundError):
                self._disk.remove(_path(self._folder, number))
            self._disk.sync_directory(self._folder)
        except OSError as error:
            self._break(str(error))

    def _close_between_writes(self) -> None:
        if self._file is not None and not self._keeps_open:
            self._file.close()

    # --- Adding ---

    def add(self, *records: R, apply: Apply | None = None) -> asyncio.Future[None]:
        """Add records. The future is done once they are stored and applied."""
        return self.add_made(lambda: records, apply)

    def add_made(
        self, make: Callable[[], Sequence[R]], apply: Apply | None = None
    ) -> asyncio.Future[None]:
        """Like `add`, for records that a worker makes because that takes a while."""
        future = asyncio.get_running_loop().create_future()
        if self._broken is not None or self._is_closed:
            future.set_exception(ReadOnlyError(self._broken or f"{self._name} is closed"))
            return future
        self._queue.append((make, apply, future))
        if not self._is_writing and not self._is_paused:
            self._begin_writing()
        return future

    def _begin_writing(self) -> None:
        self._is_writing = True
        asyncio.get_running_loop().call_soon(self._write_next)

    async def pause(self) -> None:
        """Finish the write under way, then write nothing until `resume`. Records added meanwhile wait."""
        self.pause_at_once()
        if self._is_writing:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
            self._idle = None

    def pause_at_once(self) -> None:
        """Pause without waiting. For a journal with nothing under way."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        if self._queue and not self._is_writing:
            self._begin_writing()

    def _write_next(self) -> None:
        count = 0 if self._is_paused else _ADDS_TOGETHER
        group, self._queue = self._queue[:count], self._queue[count:]
        if not group:
            self._is_writing = False
            if self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
            return
        written = self._workers.submit(self._write, [make for make, _, _ in group])
        written.add_done_callback(
            lambda done: self._written(done, [(apply, future) for _, apply, future in group])
        )

    def _write(self, makers: Iterable[Callable[[], Sequence[R]]]) -> None:
        if self._broken is not None:
            raise ReadOnlyError(self._broken)
        if self._is_released:
            raise ReadOnlyError(f"{self._name} is closed")
        if self._file is None:
            self.open()
        if self._file is None:
            self.begin(())
        assert self._file is not None
        records = [record for make in makers for record in make()]
        try:
            self._file.reopen()
        except FileNotFoundError:
            raise self._break("the file was removed while it was in use") from None
        try:
            try:
                self._file.append(_encoder.encode(records))
            except OSError:
                self._file.cut_back()
                raise
            self._marks.note(self._folder, self._number, self._file.end)
            if self._snapshots is Snapshots.IN_WORKER and self._has_grown():
                self._replace(self._snapshot(), records)
        finally:
            self._close_between_writes()

    def _has_grown(self) -> bool:
        assert self._file is not None
        return self._is_damaged or self._file.end > self._snapshot_bytes + self._bytes_max

    def _replace(self, snapshot: Iterable[R], behind: Sequence[R] = ()) -> None:
        """Begin a new file with a snapshot."""
        assert self._file is not None
        try:
            self._begin_file([*snapshot, *behind])
        except OSError:
            # The records are safe in the old file, which stays in use. Try again when it has doubled.
            self._snapshot_bytes = self._file.end
            self._is_damaged = False
        finally:
            self._close_between_writes()

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
                future.exception()  # marks it as retrieved: the caller need not wait for the future
        is_due = failure is None and self._snapshots is Snapshots.ON_LOOP and not self._is_closed
        if is_due and self._has_grown():
            self._begin_replacing()
        else:
            self._write_next()

    def _begin_replacing(self) -> None:
        try:
            replaced = self._workers.submit(self._replace, self._snapshot())
        except BaseException:
            self._write_next()  # a bug in the owner's snapshot must not leave callers waiting
            raise
        replaced.add_done_callback(self._replaced)

    def _replaced(self, done: asyncio.Future[None]) -> None:
        self._write_next()
        done.result()  # a failure that is not the disk's is a bug: the loop's handler reports it

    def _judge(self, error: OSError) -> Unavailable:
        reason = error.strerror or error  # without the file's path: clients see this
        if isinstance(error.__context__, OSError):  # cutting the failed record off has failed too
            return self._break(str(reason))
        return DiskFullError(f"{self._name} could not be written: {reason}")

    def _break(self, reason: str) -> ReadOnlyError:
        self._broken = f"{self._name} is read-only until {self._remedy}: {reason}"
        return ReadOnlyError(self._broken)

    async def close(self, *records: R) -> None:
        """Write these records last, then close the file. Nothing may be added any more."""
        last = self.add(*records) if records else None
        self._is_closed = True
        try:
            if self._is_writing:
                self._idle = asyncio.get_running_loop().create_future()
                await self._idle
            if last is not None:
                await last
        finally:
            self.release()

    async def abandon(self) -> None:
        """Write nothing more: fail what is queued, and wait for the write under way."""
        self._is_closed = True
        self._broken = self._broken or f"{self._name} is closed"
        queue, self._queue = self._queue, []
        for _, _, future in queue:
            if not future.done():
                future.set_exception(ReadOnlyError(self._broken))
                future.exception()  # marks it as retrieved: the caller need not wait for the future
        if self._is_writing:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        self.release()

    def release(self) -> None:
        """Close the file without writing anything."""
        self._is_closed = self._is_released = True
        if self._file is not None:
            self._file.close()
            self._file = None


def read_newest(
    disk: Disk, folder: str, decoder: msgspec.msgpack.Decoder[list[R]], mark: Mark | None = None
) -> LoadedRecords[R]:
    """Read the newest file, for readers beside the owner. Blocks, and changes nothing.

    `mark` is the folder's synced mark, read before the file. FileNotFoundError if there never was a file, or if a
    newer file has just replaced it.
    """
    numbers = sorted(int(name) for name in disk.list(folder) if name.isdecimal())
    missing = _find_missing(folder, numbers, mark)
    if not numbers:
        if missing is not None:
            return LoadedRecords((), (missing,), None)
        raise FileNotFoundError(errno.ENOENT, "no journal of records", folder)
    path = _path(folder, numbers[-1])
    file = disk.open(path, FileAccess.READ)
    try:
        contents, scanned = read_records(file, _durable_end(mark, numbers[-1]))
    finally:
        file.close()
    return _decode_all(decoder, contents, scanned, path, missing)


def _path(folder: str, number: int) -> str:
    return f"{folder}/{number:020d}"


def _find_missing(folder: str, numbers: Sequence[int], mark: Mark | None) -> Damage | None:
    """The damage if the file of the mark is missing and no newer file has replaced it."""
    if mark is None or (numbers and numbers[-1] >= mark.number):
        return None
    return missing_file(_path(folder, mark.number), mark)


def _durable_end(mark: Mark | None, number: int) -> int:
    return mark.end if mark is not None and mark.number == number else 0


def _decode_all(
    decoder: msgspec.msgpack.Decoder[list[R]],
    contents: Sequence[bytes],
    scanned: Scanned,
    path: str,
    missing: Damage | None,
) -> LoadedRecords[R]:
    """Decode the contents of a file's records."""
    records: list[R] = []
    damage = [*([] if missing is None else [missing]), *scanned.damage]
    for content in contents:
        try:
            records += decoder.decode(content)
        except (msgspec.DecodeError, MalformedError) as error:
            damage.append(Damage(path, 0, len(content), f"a record cannot be read: {error}"))
    return LoadedRecords(records, damage, scanned.torn)
