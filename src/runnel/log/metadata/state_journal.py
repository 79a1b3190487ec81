"""What subscriptions have done, written down beside the shard that it is about: acknowledgements and failures.

A shard's state journal is a journal of records (`record_journal`) in the folder `state/` of the shard, so that it can
move with its shard. What the contents say is its user's business; here they are bytes. There is no file before the
first of them, and none stays open between two writes: there may be as many of these as there are journals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from runnel.log.log import ShardId
from runnel.log.metadata import record_journal
from runnel.log.metadata.record_journal import RecordJournal, Snapshots
from runnel.log.segments import paths
from runnel.log.segments.synced_marks import Mark, SyncedMarks
from runnel.platform.disk import Disk
from runnel.platform.workers import Workers

Loaded = record_journal.LoadedRecords[bytes]
# Everything that is known now, as contents to begin a new file with. Called on the loop; what it returns is gone
# through in a worker, so it must not look at anything that changes meanwhile.
Snapshot = Callable[[], Iterable[bytes]]

_decoder: Final = msgspec.msgpack.Decoder(list[bytes])


class StateJournal:
    """One shard's. The user takes what is in `contents`, sets `snapshot`, and only then adds.

    What is added must be in what `snapshot` tells from that moment on, and may be added twice without harm.
    """

    def __init__(
        self,
        disk: Disk,
        workers: Workers,
        shard: ShardId,
        folder: str,
        *,
        marks: SyncedMarks,
        bytes_max: int,
        make_shard_folder: Callable[[], None],
    ) -> None:
        self.contents: list[bytes] = []  # found when it was opened; whoever has read it clears it
        self.snapshot: Snapshot | None = None
        self._journal: RecordJournal[bytes] = RecordJournal(
            disk,
            workers,
            folder,
            _decoder,
            marks=marks,
            name=f"the state journal of shard {shard}",
            bytes_max=bytes_max,
            snapshot=self._all_known,
            snapshots=Snapshots.ON_LOOP,
            before_begin=make_shard_folder,
            keeps_open=False,
        )

    def open(self) -> Loaded:
        """In a worker: what an earlier process left."""
        loaded = self._journal.open()
        self.contents = list(loaded.records)
        return loaded

    def add(self, content: bytes) -> asyncio.Future[None]:
        """Stored once the future is done. What is added while one write runs shares the next.

        DiskFullError: nothing of it is stored, and later it may be tried again. ReadOnlyError: not before a restart.
        """
        assert self.snapshot is not None, "whoever adds sets a snapshot before"
        return self._journal.add(content)

    async def pause(self) -> None:
        """Write nothing until `resume`. What is added meanwhile waits."""
        await self._journal.pause()

    def pause_at_once(self) -> None:
        self._journal.pause_at_once()

    def resume(self) -> None:
        self._journal.resume()

    async def close(self) -> None:
        """Store what is queued, then take no more."""
        await self._journal.close()

    def let_go(self) -> None:
        self._journal.let_go()

    def _all_known(self) -> Iterable[bytes]:
        assert self.snapshot is not None
        return self.snapshot()


class MemoryState:
    """The twin that forgets: whatever is added is known to its user, and nobody reads it again."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.snapshot: Snapshot | None = None

    def add(self, content: bytes) -> asyncio.Future[None]:  # noqa: ARG002 - it is not kept
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    async def close(self) -> None:
        """Nothing is open."""


class StateJournals:
    """The state journals of a data directory, by shard."""

    def __init__(
        self,
        disk: Disk,
        workers: Workers,
        directory: str,
        *,
        marks: SyncedMarks,
        bytes_max: int,
        make_shard_folder: Callable[[ShardId], None],
    ) -> None:
        self._disk = disk
        self._workers = workers
        self._directory = directory
        self._marks = marks
        self._bytes_max = bytes_max
        self._make_shard_folder = make_shard_folder
        self._journals: dict[ShardId, StateJournal] = {}
        self._is_paused = False

    def of(self, shard: ShardId) -> StateJournal:
        journal = self._journals.get(shard)
        if journal is None:
            journal = self._journals[shard] = StateJournal(
                self._disk,
                self._workers,
                shard,
                self._folder(shard),
                marks=self._marks,
                bytes_max=self._bytes_max,
                make_shard_folder=lambda: self._make_shard_folder(shard),
            )
            if self._is_paused:
                journal.pause_at_once()
        return journal

    def _folder(self, shard: ShardId) -> str:
        return paths.state_folder(paths.shard_folder(self._directory, shard.journal, shard.shard))

    def open_found(self, shards: Sequence[ShardId]) -> list[Loaded]:
        """In a worker: those that an earlier process made."""
        return [self.of(shard).open() for shard in shards if self._was_made(self._folder(shard))]

    def _was_made(self, folder: str) -> bool:
        return bool(self._disk.list(folder)) or self._marks.get(folder) is not None

    async def pause(self) -> None:
        """Write nothing until `resume`, to none of them: those that are made meanwhile wait too."""
        self._is_paused = True
        for journal in list(self._journals.values()):
            await journal.pause()

    def resume(self) -> None:
        self._is_paused = False
        for journal in self._journals.values():
            journal.resume()

    async def close(self) -> None:
        """All of them, whatever fails: nobody may be left without an answer."""
        journals = self._journals.values()
        outcomes = await asyncio.gather(
            *(journal.close() for journal in journals), return_exceptions=True
        )
        for failure in outcomes:
            if failure is not None:
                raise failure

    def let_go(self) -> None:
        for journal in self._journals.values():
            journal.let_go()


def read_state(disk: Disk, shard_folder: str, mark: Mark | None = None) -> Loaded | None:
    """A shard's state as it stands, for readers beside the owner; None if there is none, or it is being replaced."""
    try:
        return record_journal.read_newest(disk, paths.state_folder(shard_folder), _decoder, mark)
    except FileNotFoundError:
        return None
