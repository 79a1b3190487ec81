"""`OwnedShards`: the shards that a log serves, and the beginning and end of each term of ownership."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from runnel.errors import LockedError, RunnelError, UnknownTopicError
from runnel.log.disk.shard import DiskShard
from runnel.log.disk.shard_factory import ShardFactory
from runnel.log.ended_terms import EndedTerms
from runnel.log.log import ShardId, TermRecords
from runnel.log.metadata.state_journal import StateJournals
from runnel.log.metadata.topic_table import TopicTable
from runnel.log.segments import paths
from runnel.log.shard_view import ShardView, moved
from runnel.platform.disk import Disk, DiskLock
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers

# Loads a shard that is not served here from its files, for a term with an epoch above this one.
Load = Callable[[ShardId, int], Awaitable[DiskShard]]


class OwnedShards:
    """The shards of one log by id, with the view of each term.

    A log that has its directory for itself (`is_exclusive`) serves every shard but those that it has given up: a shard
    without files begins with its first use. Otherwise it serves the shards that it has acquired, under a lock on the
    folder of each.
    """

    def __init__(
        self,
        factory: ShardFactory,
        load: Load,
        topics: TopicTable,
        states: StateJournals,
        disk: Disk,
        workers: Workers,
        tasks: OwnedTasks,
        *,
        is_exclusive: bool,
        terms: TermRecords | None,
        on_new_shard: Callable[[DiskShard], None],
    ) -> None:
        self._factory = factory
        self._load = load
        self._topics = topics
        self._states = states
        self._disk = disk
        self._workers = workers
        self._tasks = tasks
        self._is_exclusive = is_exclusive
        self._terms = terms
        self._on_new_shard = on_new_shard
        self.shards: Final[dict[ShardId, DiskShard]] = {}
        self._views: dict[ShardId, ShardView] = {}
        self._given_up: dict[ShardId, int] = {}  # with the epoch of the term that ended last
        self._locks: dict[ShardId, DiskLock] = {}
        self._changing: dict[ShardId, asyncio.Lock] = {}  # held while a term begins or ends
        self._changes: set[asyncio.Task[Any]] = set()
        self._refusal: RunnelError | None = None
        self.ended_terms: Final = EndedTerms()
        self.first_epoch = 1
        """Of shards that have none recorded."""

    def __iter__(self) -> Iterator[DiskShard]:
        return iter(list(self.shards.values()))

    # --- Look-ups ---

    def find(self, shard_id: ShardId) -> DiskShard | None:
        """The shard, if it is served here."""
        return self.shards.get(shard_id)

    def get(self, shard_id: ShardId) -> DiskShard:
        """The shard, which may begin with this use. MovedError if it is not served here."""
        shard = self.shards.get(shard_id)
        if shard is None:
            if self.is_away(shard_id):
                raise moved(shard_id)
            catalogue = self._factory.catalogue(shard_id)
            shard = self._factory.shard(shard_id, catalogue, self.first_epoch)
            self.add(shard)
        return shard

    def find_or_begin(self, shard_id: ShardId) -> DiskShard | None:
        """The shard, which may begin with this use, unless another log may serve it."""
        return None if self.is_away(shard_id) else self.get(shard_id)

    def known(self, shard_id: ShardId) -> DiskShard:
        """The shard. UnknownTopicError if no topic uses it."""
        shard = self.shards.get(shard_id)
        if shard is None:
            if shard_id not in self._given_up and not self._topics.uses(shard_id):
                raise UnknownTopicError(f"there is no shard {shard_id}")
            shard = self.get(shard_id)  # nothing has been published there yet
        return shard

    def view(self, shard_id: ShardId) -> ShardView:
        """The view of the shard's present term."""
        view = self._views.get(shard_id)
        if view is None:
            shard = self.known(shard_id)
            view = self._views[shard_id] = ShardView(
                shard, shard.epoch, self._topics, self._states.of
            )
        return view

    def of_journal(self, journal: str) -> list[DiskShard]:
        """The shards of a journal that are served here."""
        shards = map(self.shards.get, self._topics.shards_of(journal))
        return [shard for shard in shards if shard is not None]

    def is_away(self, shard_id: ShardId) -> bool:
        """Whether another log may serve it."""
        return shard_id not in self.shards and (
            not self._is_exclusive or shard_id in self._given_up
        )

    # --- Terms ---

    def add(self, shard: DiskShard) -> None:
        """Serve a shard from now on."""
        self.shards[shard.id] = shard
        if self._refusal is not None:
            shard.writer.refuse(self._refusal)
        self._on_new_shard(shard)

    async def acquire(self, shard_id: ShardId, above: int) -> ShardView:
        """See `ShardOwnership`."""
        view: ShardView = await self._change(shard_id, partial(self._begin_term, shard_id, above))
        return view

    async def release(self, shard_id: ShardId) -> None:
        """See `ShardOwnership`."""
        await self._change(shard_id, partial(self._release, shard_id))

    async def drop(self, shard_id: ShardId) -> None:
        """See `ShardOwnership`."""
        shard = self.shards.get(shard_id)
        if shard is None:
            return
        shard.drop(moved(shard_id))
        self._end_term(shard)  # at once, also while a release waits
        await self._change(shard_id, partial(self._let_go, shard))

    async def _change(self, shard_id: ShardId, work: Callable[[], Awaitable[Any]]) -> Any:
        """Do this to the end even if the caller is cancelled, and one after the other for each shard."""
        lock = self._changing.setdefault(shard_id, asyncio.Lock())

        async def change() -> Any:
            async with lock:
                return await work()

        task = self._tasks.start_awaited(change())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _begin_term(self, shard_id: ShardId, above: int) -> ShardView:
        if shard_id in self.shards:
            return self.view(shard_id)
        if not self._is_exclusive:
            self._locks[shard_id] = await self._workers.submit(self._lock, shard_id)
        shard: DiskShard | None = None
        try:
            shard = await self._load(shard_id, max(above, self._given_up.get(shard_id, 0)))
            await shard.writer.begin_term()
            if self._terms is not None:
                next_entry = shard.entries().next_offset
                await self._terms.begin(shard_id, shard.epoch, next_entry, has_lock=True)
        except BaseException:
            if shard is not None:
                shard.drop(moved(shard_id))
                await shard.let_go()
            await self._states.abandon_one(shard_id)
            self._unlock(shard_id)
            raise
        self._given_up.pop(shard_id, None)
        self.add(shard)
        view = self.view(shard_id)
        self._factory.listener.on_shard_acquired(view)
        return view

    async def _release(self, shard_id: ShardId) -> None:
        shard = self.shards.get(shard_id)
        if shard is None:
            return
        await self._factory.listener.before_release(self.view(shard_id))
        if self.shards.get(shard_id) is not shard:
            return  # lost meanwhile
        shard.writer.refuse(moved(shard_id))
        await shard.writer.wait_idle()
        if not self._end_term(shard):
            return
        next_entry = shard.entries().next_offset
        try:
            await self._states.close_one(shard_id)
            await shard.close()
        finally:
            await self._let_go(shard, next_entry)

    def _end_term(self, shard: DiskShard) -> bool:
        """Stop serving the shard, and tell the listener. False if that has happened already."""
        if self.shards.get(shard.id) is not shard:
            return False
        view = self.view(shard.id)
        del self.shards[shard.id], self._views[shard.id]
        self.ended_terms.add(shard.statistics())
        self._given_up[shard.id] = shard.epoch
        view.end()
        self._factory.listener.on_shard_released(view)
        return True

    async def _let_go(self, shard: DiskShard, next_entry: int = 0) -> None:
        """Leave the shard's files to others. `next_entry`: the term has ended as planned."""
        try:
            await self._states.abandon_one(shard.id)
            await shard.let_go()
            shard.forget_files()
            if self._terms is not None and next_entry:
                await self._terms.end(shard.id, shard.epoch, next_entry)
        finally:
            self._unlock(shard.id)

    # --- Locks on the folders of shards ---

    def _lock(self, shard_id: ShardId) -> DiskLock:
        self._factory.make_folder(shard_id)
        try:
            return self._disk.lock(f"{self._factory.folder(shard_id)}/{paths.LOCK_FILE}")
        except LockedError:
            raise moved(shard_id) from None

    def _unlock(self, shard_id: ShardId) -> None:
        lock = self._locks.pop(shard_id, None)
        if lock is not None:
            lock.release()

    def release_locks(self) -> None:
        for shard_id in list(self._locks):
            self._unlock(shard_id)

    # --- Closing ---

    def refuse(self, reason: RunnelError) -> None:
        """Take no batches any more, in any shard, also in one that is being acquired."""
        self._refusal = reason
        for shard in self.shards.values():
            shard.writer.refuse(reason)

    async def settle(self) -> None:
        """Wait until no term begins or ends any more. No other may begin meanwhile."""
        if self._changes:
            await asyncio.wait(self._changes)

    async def close(self) -> Sequence[BaseException | None]:
        """Store what is queued in all shards. Returns how each of them ended."""
        return await asyncio.gather(
            *(shard.close() for shard in self.shards.values()), return_exceptions=True
        )
