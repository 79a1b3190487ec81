"""Reports what a node of a cluster does with its shards, as events."""

from __future__ import annotations

from runnel.broker.monitoring.events import EventKind, Events
from runnel.cluster import Wish
from runnel.log.log import ShardId


class NodeReports:
    """The `NodeObserver` of a broker."""

    def __init__(self, node: str, events: Events) -> None:
        self._node = node
        self._events = events

    def on_taken(self, shard: ShardId, epoch: int) -> None:
        self._events.emit(EventKind.SHARD_TAKEN, str(shard), epoch=epoch)

    def on_not_taken(self, shard: ShardId, error: BaseException) -> None:
        self._events.emit(EventKind.SHARD_NOT_TAKEN, str(shard), error=str(error))

    def on_given_up(self, shard: ShardId, reason: str, took_ns: int) -> None:
        self._events.emit(
            EventKind.SHARD_GIVEN_UP, str(shard), reason=reason, took_ms=took_ns / 1e6
        )

    def on_wish(self, wish: Wish) -> None:
        self._events.emit(
            EventKind.SHARD_WANTED, str(wish.shard), node=wish.node, reason=wish.reason
        )

    def on_fenced(self) -> None:
        self._events.emit(EventKind.NODE_FENCED, self._node)
