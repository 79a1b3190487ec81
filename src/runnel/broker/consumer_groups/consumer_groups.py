"""The broker's verbs of acknowledged work, and the wiring of their parts."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, Final, TypeVar

from runnel.broker.consumer_groups.ack_journals import AckJournals
from runnel.broker.consumer_groups.consumer import WorkConsumer
from runnel.broker.consumer_groups.consumer_group import ConsumerGroupParts
from runnel.broker.consumer_groups.dead_letter_queues import DeadLetterQueues, SettleRequest
from runnel.broker.consumer_groups.dead_letter_writer import DeadLetterWriter, Publish, WaitRoom
from runnel.broker.consumer_groups.errands import ERRAND_PREFIX, Errands
from runnel.broker.consumer_groups.group_holds import GroupHolds
from runnel.broker.consumer_groups.group_stats import GroupStats
from runnel.broker.consumer_groups.run_cache import RunCache
from runnel.broker.consumer_groups.sink import HeldPart, WorkSink
from runnel.broker.consumer_groups.subscriptions import SubscriptionRequest, WorkSubscriptions
from runnel.broker.consumer_groups.timer_queue import TimerQueue
from runnel.broker.limits.fair_semaphore import FairSemaphore
from runnel.broker.limits.loop_share import LoopShare
from runnel.broker.limits.quotas import Account
from runnel.broker.live.subscription import LiveSubscription
from runnel.broker.monitoring.events import Events
from runnel.broker.monitoring.metrics import Metrics
from runnel.broker.pages import Listed, ListRequest
from runnel.broker.stores import Stores
from runnel.config import Settings
from runnel.errors import MovedError
from runnel.formats.batch import Batch
from runnel.formats.heads import Start
from runnel.formats.work_heads import Consume, SubscriptionState
from runnel.log.log import LogTopic, OwnedShard, VisibleBatch
from runnel.platform.clock import Clock
from runnel.platform.tasks import OwnedTasks
from runnel.platform.workers import Workers
from runnel.topics.names import dead_letter_topic
from runnel.topics.pattern_index import PatternIndex

_RUN_CACHE_BYTES_MAX: Final = 32 * 2**20
# Concurrent page reads of all consumer groups together.
_READS_AT_ONCE: Final = 4

T = TypeVar("T")


class ConsumerGroups:
    """Acknowledged work as `Broker` offers it. `holds` is what the stores were opened with."""

    def __init__(
        self,
        settings: Settings,
        stores: Stores,
        holds: GroupHolds,
        index: PatternIndex[LiveSubscription],
        clock: Clock,
        workers: Workers,
        metrics: Metrics,
        events: Events,
        publish: Publish,
        wait_room: WaitRoom,
        share: LoopShare,
    ) -> None:
        timers = TimerQueue(clock)
        run_cache = RunCache(_RUN_CACHE_BYTES_MAX)
        state = AckJournals(stores, clock, timers)
        tasks = OwnedTasks("the consumer groups")
        errands = Errands(stores, tasks, timers, clock)
        dead_letter_writer = DeadLetterWriter(
            stores, run_cache, workers, clock, events, settings.limits, publish, wait_room, errands
        )
        parts = ConsumerGroupParts(
            stores=stores,
            state=state,
            run_cache=run_cache,
            timers=timers,
            clock=clock,
            workers=workers,
            reads=FairSemaphore(_READS_AT_ONCE),
            tasks=tasks,
            metrics=metrics,
            events=events,
            dead_letter_writer=dead_letter_writer,
            errands=errands,
            left_holders=OrderedDict(),
            share=share,
        )
        self._stores = stores
        self._timers = timers
        self._errands = errands
        self._state = state
        self._subscriptions = WorkSubscriptions(parts, index)
        self._dead = DeadLetterQueues(
            stores, state, self._subscriptions, dead_letter_writer, workers, errands
        )
        self._stats = GroupStats(state, self._subscriptions, self._dead, workers, clock, share)
        self._keepers: list[asyncio.Task[None]] = []
        self._verbs = OwnedTasks("the consumer groups")
        self._subscriptions.open()
        holds.follow(state, self._subscriptions)

    def tell_lost(self) -> None:
        """Report subscriptions whose definitions are gone. Called after damage was found."""
        self._subscriptions.tell_lost()

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._errands.open()
        self._keepers = [
            loop.create_task(self._timers.run(), name="runnel-leases"),
            loop.create_task(self._subscriptions.run(), name="runnel-subscriptions"),
        ]

    def abandon(self) -> None:
        """Serve nobody any more, as if the process had ended."""
        self._subscriptions.abandon()

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        if self._keepers:
            await asyncio.wait(self._keepers)
        await self._verbs.wait()
        await self._subscriptions.close()

    # --- Events of the logs ---

    def on_stored(self, stored: VisibleBatch) -> None:
        self._subscriptions.on_stored(stored)

    def on_topic_made(self, info: LogTopic) -> None:
        self._subscriptions.on_topic_made(info)

    def on_topic_deleted(self, name: str) -> None:
        self._subscriptions.on_topic_deleted(name)

    def on_topic_purged(self, name: str) -> None:
        self._subscriptions.on_topic_purged(name)

    def on_subscription_changed(self, name: str) -> None:
        if name.startswith(ERRAND_PREFIX):
            self._errands.follow(name)
            return
        self._subscriptions.on_subscription_changed(name)

    def on_shard_acquired(self, shard: OwnedShard) -> None:
        self._errands.on_shard_acquired(shard)
        self._subscriptions.on_shard_acquired(shard)

    async def before_release(self, shard: OwnedShard) -> None:
        await self._subscriptions.before_release(shard)

    def on_shard_released(self, shard: OwnedShard) -> None:
        self._subscriptions.on_shard_released(shard)

    # --- Verbs. A caller may leave; a verb that has begun still finishes, so that memory and disk agree. ---

    def _start_verb(self, verb: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._verbs.start_awaited(verb)
        task.add_done_callback(_retrieve_failure)
        return task

    async def consume(
        self,
        number: int,
        sink: WorkSink,
        request: Consume,
        account: Account | None = None,
        part: HeldPart | None = None,
    ) -> WorkConsumer:
        joining = self._start_verb(
            self._subscriptions.consume(number, sink, request, account, part)
        )
        try:
            return await asyncio.shield(joining)
        except asyncio.CancelledError:
            joining.add_done_callback(_close_joined)
            raise

    async def make_subscription(
        self, request: SubscriptionRequest, account: Account | None = None
    ) -> None:
        await asyncio.shield(self._start_verb(self._subscriptions.make(request, account)))

    async def delete_subscription(self, name: str) -> None:
        await asyncio.shield(self._start_verb(self._subscriptions.delete(name)))

    async def pause_subscription(self, name: str, *, is_paused: bool) -> None:
        pausing = self._subscriptions.pause(name, is_paused=is_paused)
        await asyncio.shield(self._start_verb(pausing))

    async def move_subscription(self, name: str, start: Start, member: str | None = None) -> None:
        await asyncio.shield(self._start_verb(self._subscriptions.move(name, start, member)))

    async def remove_member(self, name: str, member: str) -> None:
        await asyncio.shield(self._start_verb(self._subscriptions.remove_member(name, member)))

    def owned_by(self, owner: str) -> int:
        """How many of the existing subscriptions this token made."""
        return self._subscriptions.owned_by(owner)

    def patterns_of(self, name: str) -> Sequence[str]:
        """The patterns of a subscription. Raises UnknownSubscriptionError if it does not exist."""
        return self._subscriptions.get(name).definition.patterns

    async def report(self) -> Sequence[SubscriptionState]:
        """All subscriptions as of a moment ago: with many of them, not every call computes them anew."""
        return await self._stats.report()

    async def subscriptions(
        self,
        name: str | None = None,
        *,
        is_visible: Callable[[Sequence[str]], bool] | None = None,
        owner: Hashable = None,
    ) -> list[SubscriptionState]:
        """All subscriptions, or one. `is_visible` selects by patterns. `owner`: see `LoopShare.turn`."""
        return await self._stats.states(name, is_visible=is_visible, owner=owner)

    async def subscription_page(
        self, request: ListRequest[Sequence[str]]
    ) -> Listed[SubscriptionState]:
        """A page of the subscriptions whose patterns are visible, and whether it is the last page."""
        return await self._stats.page(request)

    async def dead_letters(
        self, subscription: str, offset: int, messages_max: int
    ) -> tuple[Sequence[Batch], int]:
        try:
            return await self._dead.list(subscription, offset, messages_max)
        except MovedError as error:
            raise self._stores.moved(error, [dead_letter_topic(subscription)]) from None

    async def settle_dead(self, request: SettleRequest) -> int:
        try:
            return await asyncio.shield(self._start_verb(self._dead.settle(request)))
        except MovedError as error:
            topic = dead_letter_topic(request.subscription)
            raise self._stores.moved(error, [topic]) from None


def _retrieve_failure(task: asyncio.Task[Any]) -> None:
    """Mark a failure as retrieved: the caller that waited for the verb may have gone."""
    if not task.cancelled():
        task.exception()


def _close_joined(joining: asyncio.Task[WorkConsumer]) -> None:
    """Close a consumer whose caller has gone before it joined."""
    if not joining.cancelled() and joining.exception() is None:
        joining.result().close(is_clean=True)
