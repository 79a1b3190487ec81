"""Makes checkpoints of a data directory in use: every file as of one moment, for a backup."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from uuid import uuid4

from runnel.errors import ClientFault, Unavailable
from runnel.log.backup import checkpoint
from runnel.log.disk.directory_metadata import DirectoryMetadata
from runnel.log.disk.shard import DiskShard
from runnel.log.log import ShardId
from runnel.log.metadata.state_journal import StateJournals
from runnel.platform.clock import Clock
from runnel.platform.workers import Workers


class Checkpoints:
    """Makes and drops the checkpoint of one log. At most one exists at a time.

    The log is at rest while a checkpoint is made: no file changes, and batches wait in the queues. `shards` is the
    log's table, which may grow meanwhile.
    """

    def __init__(
        self,
        directory: str,
        shards: Mapping[ShardId, DiskShard],
        states: StateJournals,
        metadata: DirectoryMetadata,
        clock: Clock,
        workers: Workers,
        check_open: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._shards = shards
        self._states = states
        self._metadata = metadata
        self._clock = clock
        self._workers = workers
        self._check_open = check_open
        self._exists = False
        self._paused: list[DiskShard] | None = None  # None: the log is not at rest
        self.resting = asyncio.Lock()  # held while the log is at rest, or closing

    async def make(self) -> tuple[str, str]:
        """Make the checkpoint; return its path, in the data directory, and its id.

        It stays until `drop`. ClientFault if one exists already. Publishers wait for as long as it takes to make a
        link for each file.
        """
        self._check_open()
        if self._exists:
            raise ClientFault("a copy of this broker is being made; wait until it is done")
        self._exists = True
        contents_id = uuid4().hex
        try:
            async with self._at_rest():
                prefix = f"{self._directory}/"
                ends = {
                    path.removeprefix(prefix): end
                    for shard in self._shards.values()
                    for path, end in shard.growing_ends().items()
                }
                contents = checkpoint.Contents(contents_id, self._clock.time_ns(), ends)
                path = await self._workers.submit(checkpoint.make, self._directory, contents)
                await self._metadata.copy_to(path)
        except OSError as error:
            self._exists = False
            raise Unavailable(
                f"a checkpoint could not be made: {error.strerror or error}"
            ) from error
        except BaseException:
            self._exists = False
            raise
        return path, contents_id

    async def drop(self) -> None:
        """Remove the checkpoint's files, so that the next one can be made."""
        try:
            await self._workers.submit(checkpoint.discard, self._directory)
        finally:
            self._exists = False

    def on_new_shard(self, shard: DiskShard) -> None:
        """Pause a new shard if the log is at rest."""
        if self._paused is not None:
            shard.writer.pause_at_once()
            shard.catalogue.pause_at_once()
            self._paused.append(shard)

    @asynccontextmanager
    async def _at_rest(self) -> AsyncIterator[None]:
        async with self.resting, AsyncExitStack() as ends:
            self._check_open()
            # Trimmers first: waiting for them may take long, but delays no publisher.
            undisturbed: set[ShardId] = set()
            while undisturbed != self._shards.keys():
                for shard_id, shard in list(self._shards.items()):
                    if shard_id not in undisturbed:
                        await ends.enter_async_context(shard.undisturbed())
                        undisturbed.add(shard_id)
            self._paused = []
            ends.callback(self._resume_shards)
            for shard in list(self._shards.values()):  # shards made from now on begin paused
                self._paused.append(shard)  # first: it is resumed even if this wait is cancelled
                await shard.writer.pause()
            # Journals last: a writer may be waiting for one.
            ends.callback(self._states.resume)
            await self._states.pause()
            for shard in list(self._paused):
                await shard.catalogue.pause()
            ends.callback(self._metadata.resume)
            await self._metadata.pause()
            yield

    def _resume_shards(self) -> None:
        assert self._paused is not None
        paused, self._paused = self._paused, None
        for shard in paused:
            shard.catalogue.resume()
            shard.writer.resume()
