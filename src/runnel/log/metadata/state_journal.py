"""State journals: record the progress of subscriptions in each shard, that is acknowledgements and failures.

A shard's state journal is a journal of records (`record_journal`) in the shard's folder `state/`, so that it can move
with its shard. Its contents are bytes that only its user interprets. It has no file before the first content, and keeps
no file open between two writes: there may be as many state journals as journals.
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
# Returns everything that is known now, as the first contents of a new file. It is called on the loop. A worker iterates
# over the result, which therefore must not depend on anything that changes meanwhile.
Snapshot = Callable[[], Iterable[bytes]]

_decoder: Final = msgspec.msgpack.Decoder(list[bytes])


class StateJournal:
    """The state journal of one shard. The user reads `contents`, sets `snapshot`, and only then adds.

    From the moment it is added, `snapshot` must include a content. A content may be added twice without harm.
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
        self.contents: list[bytes] = []  # found by `open`; the user clears it after reading
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
        """Load what an earlier process left. Runs in a worker."""
        loaded = self._journal.open()
        self.contents = list(loaded.records)
        return loaded

    def add(self, content: bytes) -> asyncio.Future[None]:
        """Add a content; it is stored when the future is done. Contents added during one write share the next.

        DiskFullError: nothing of it is stored, and the caller may retry. ReadOnlyError: a retry needs a restart.
        """
        assert self.snapshot is not None, "set `snapshot` before the first `add`"
        return self._journal.add(content)

    async def pause(self) -> None:
        """Write nothing until `resume`. Contents added meanwhile wait."""
        await self._journal.pause()

    def pause_at_once(self) -> None:
        self._journal.pause_at_once()

    def resume(self) -> None:
        self._journal.resume()

    @property
    def is_made(self) -> bool:
        """Whether an earlier process made it. Blocks."""
        return self._journal.is_made

    async def close(self) -> None:
        """Store what is queued, then accept no more."""
        await self._journal.close()

    async def abandon(self) -> None:
        """Write nothing more, and wait for the write under way."""
        await self._journal.abandon()

    def release(self) -> None:
        self._journal.release()

    def _all_known(self) -> Iterable[bytes]:
        assert self.snapshot is not None
        return self.snapshot()


class MemoryState:
    """A state journal that keeps nothing, for logs in memory: the user has the contents in memory anyway."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.snapshot: Snapshot | None = None

    def add(self, content: bytes) -> asyncio.Future[None]:  # noqa: ARG002 - it is not kept
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


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
        """Open the state journals that an earlier process made. Runs in a worker."""
        return [journal.open() for journal in map(self.of, shards) if journal.is_made]

    async def close_one(self, shard: ShardId) -> None:
        """Store what is queued for a shard, and forget it: another log may write its state from now on."""
        journal = self._journals.pop(shard, None)
        if journal is not None:
            await journal.close()

    async def abandon_one(self, shard: ShardId) -> None:
        """Write nothing more for a shard, and forget it."""
        journal = self._journals.pop(shard, None)
        if journal is not None:
            await journal.abandon()

    async def pause(self) -> None:
        """Write nothing to any state journal until `resume`. New state journals begin paused."""
        self._is_paused = True
        for journal in list(self._journals.values()):
            await journal.pause()

    def resume(self) -> None:
        self._is_paused = False
        for journal in self._journals.values():
            journal.resume()

    async def close(self) -> None:
        """Close all of them even if some fail: every waiting caller gets an answer."""
        journals = self._journals.values()
        outcomes = await asyncio.gather(
            *(journal.close() for journal in journals), return_exceptions=True
        )
        for failure in outcomes:
            if failure is not None:
                raise failure

    def release(self) -> None:
        for journal in self._journals.values():
            journal.release()


def read_state(disk: Disk, shard_folder: str, mark: Mark | None = None) -> Loaded | None:
    """Read a shard's state, for readers beside the owner; None if there is none, or it is being replaced."""
    try:
        return record_journal.read_newest(disk, paths.state_folder(shard_folder), _decoder, mark)
    except FileNotFoundError:
        return None
