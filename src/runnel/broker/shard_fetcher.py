"""Reads shards for pipelines: lists the shards of some patterns, and fetches their entries in order, page by page.

A position in a shard is small however many topics the shard has, and always names the same messages.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache

import msgspec

from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.live import start_positions
from runnel.broker.live.feeds import damage_gaps, passed_gaps, wanted_block
from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.stores import Stores, check_epoch
from runnel.errors import ClientFault
from runnel.formats.wire import GapState, ShardState
from runnel.log.log import EntryPage, Position, ShardId
from runnel.platform.workers import Workers
from runnel.topics.pattern_index import PatternIndex
from runnel.topics.patterns import Pattern, any_of


class ShardFetchRequest(msgspec.Struct, frozen=True):
    """Asks for the matching messages of a shard from an entry on, in the order in which they were stored."""

    shard: ShardId
    entry: int
    end_entry: int = 0  # the first entry that is not read; 0: read to the end
    patterns: Sequence[str] = ("*",)
    epoch: int = 0  # entries of another epoch are lost; 0: any epoch
    bytes_max: int = 2**20


class ShardFetchResult(msgspec.Struct, frozen=True):
    """Blocks of a shard in order, and the next entry to fetch. A page without a match need not be the last."""

    blocks: Sequence[bytes | memoryview]
    messages: int
    epoch: int
    next_entry: int
    first_entry: int
    end_entry: int
    gaps: Sequence[GapState] = ()


class ShardFetcher:
    """Lists shards, and fetches their entries."""

    def __init__(
        self,
        stores: Stores,
        index: PatternIndex[LiveSubscription],
        workers: Workers,
        share: LoopShare,
        bytes_max: int,
    ) -> None:
        self._share = share
        self._stores = stores
        self._index = index
        self._workers = workers
        self._bytes_max = bytes_max

    async def shards(
        self,
        patterns: Sequence[str],
        time_ns: int | None,
        owner: Hashable,
        *,
        part_only: bool = False,
    ) -> list[ShardState]:
        """The shards that have a matching topic, in order of their names. `part_only`: those that are served here."""
        parsed = [Pattern(text) for text in patterns]
        share = self._share
        matching = await start_positions.matching_shards(
            self._stores, self._index, parsed, share, owner
        )
        if part_only:
            served = {shard for log in self._stores.kept for shard in log.shards()}
            matching = {shard: log for shard, log in matching.items() if shard in served}
        entries: Mapping[ShardId, int] = {}
        if time_ns is not None:
            entries = await start_positions.entries_at(matching, time_ns, share, owner)
        found: list[ShardState] = []
        async for some in share.steps(
            sorted(matching.items()), owner, start_positions.SHARDS_PER_STEP
        ):
            for shard, log in some:
                owned = log.shard(shard)
                bounds = owned.entries()
                found.append(
                    ShardState(
                        shard.journal,
                        shard.shard,
                        owned.epoch,
                        bounds.first_offset,
                        bounds.next_offset,
                        entries.get(shard, 0),
                    )
                )
        return found

    async def fetch(self, request: ShardFetchRequest) -> ShardFetchResult:
        """Fetch one page. OffsetGoneError and OffsetAheadError: the entry does not exist any more, or not yet."""
        entry = request.entry
        if entry < 1:
            raise ClientFault(f"entry {entry}: entries are numbered 1, 2, 3 …")
        log, shard = self._stores.shard(request.shard)
        await check_epoch(log, shard, request.epoch)
        matches = lru_cache(None)(any_of(map(Pattern, request.patterns)))
        position = Position(request.epoch, entry)
        page = await log.read_shard(
            shard.id, position, bytes_max=max(1, min(request.bytes_max, self._bytes_max))
        )
        if request.end_entry:
            page = _up_to(page, request.end_entry)
        blocks: list[bytes | memoryview] = []
        messages = 0
        for found in page.found:
            block, count = await wanted_block(found, matches, position, self._workers)
            if count:
                blocks.append(block)
                messages += count
        bounds = shard.entries()
        gaps = damage_gaps(page, matches)
        gaps += passed_gaps(page, matches, log.metadata.topics)
        return ShardFetchResult(
            blocks,
            messages,
            page.next_position.epoch or shard.epoch,
            page.next_position.entry,
            bounds.first_offset,
            bounds.next_offset,
            gaps,
        )


def _up_to(page: EntryPage, end_entry: int) -> EntryPage:
    """The part of a page before this entry."""
    if page.next_position.entry <= end_entry:
        return page
    found = [each for each in page.found if each.batch.envelope.entry < end_entry]
    gaps = [gap for gap in page.gaps if gap.first_offset < end_entry]
    position = msgspec.structs.replace(page.next_position, entry=end_entry)
    return EntryPage(found, position, gaps, page.passed)
