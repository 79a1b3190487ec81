"""Delivers a visible batch to its subscribers: work per run and per subscriber, never per message.

Runs whose topics have the same subscribers are handled together. A subscriber to all runs gets the stored bytes. Some
of the runs are cut out once for all subscribers that want the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from runnel.broker.live.subscription import LiveDelivery, LiveSubscription
from runnel.formats import block
from runnel.formats import envelope as envelopes
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec, Envelope
from runnel.log.log import ShardId, VisibleBatch

Subscribers = tuple[LiveSubscription, ...]
Shared = tuple["SharedRuns", Sequence[LiveSubscription]]


class FallBehind(Protocol):
    """Makes a subscription read the log from this batch on, because it is slow, or because that is easier."""

    def __call__(
        self, subscription: LiveSubscription, shard: ShardId, envelope: Envelope, *, is_slow: bool
    ) -> None: ...


class SharedRuns:
    """Some runs of a batch, or all of them (`runs` is None). They are packed for the first subscriber."""

    __slots__ = ("_delivery", "_envelope", "_runs", "_shard", "body", "stored")

    def __init__(self, shard: ShardId, stored: VisibleBatch, runs: Sequence[int] | None) -> None:
        self.stored = stored
        self._shard = shard
        self._runs = runs
        self._delivery: LiveDelivery | None = None
        self._envelope = stored.envelope
        self.body = stored.body

    @property
    def needs_unpacking(self) -> bool:
        """Whether the runs have to be cut out of a compressed body, which takes a while."""
        return self._runs is not None and self.stored.envelope.codec != Codec.NONE

    @property
    def envelope(self) -> Envelope:
        """The envelope of what is delivered. Call `delivery` before."""
        return self._envelope

    def topics_and_counts(self) -> tuple[Sequence[str], Sequence[int]]:
        """The topic and the message count of each run."""
        head = self.stored.envelope
        counts = head.column32(head.counts)
        if self._runs is None:
            return head.topics, counts
        return [head.topics[run] for run in self._runs], [counts[run] for run in self._runs]

    def delivery(self) -> LiveDelivery:
        if self._delivery is None:
            head = self.stored.envelope
            epoch, entry = int.from_bytes(head.epochs[-8:], "little"), head.entry
            if self._runs is None:
                count = head.message_count
                self._delivery = whole_delivery(self._shard, self.stored, epoch, entry, count)
            else:
                batch = Batch(head, self.stored.body).cut(self._runs)
                self._envelope, self.body = batch.envelope, batch.body
                buffers = block.pack(envelopes.encode(batch.envelope), batch.body)
                size = sum(map(len, buffers))
                self._delivery = LiveDelivery(
                    self._shard, epoch, entry + 1, buffers, size, batch.envelope.message_count
                )
        return self._delivery


def whole_delivery(
    shard: ShardId, stored: VisibleBatch, epoch: int, entry: int, messages: int
) -> LiveDelivery:
    """The delivery of a whole batch."""
    buffers = stored.block()
    return LiveDelivery(shard, epoch, entry + 1, buffers, sum(map(len, buffers)), messages)


def shares(shard: ShardId, stored: VisibleBatch, by_run: Sequence[Subscribers]) -> list[Shared]:
    """The runs that each subscriber gets, given the subscribers of each run."""
    first = by_run[0]
    if len(by_run) == 1 or all([each is first for each in by_run]):  # noqa: C419 - quicker than a generator
        return [(SharedRuns(shard, stored, None), first)] if first else []
    # The index gives topics with the same subscribers the same tuple, so comparing identities is enough.
    groups: dict[int, tuple[Subscribers, list[int]]] = {}
    for run, subscribers in enumerate(by_run):
        groups.setdefault(id(subscribers), (subscribers, []))[1].append(run)
    groups_of: dict[LiveSubscription, list[int]] = {}
    for group, (subscribers, _) in groups.items():
        for subscriber in subscribers:
            groups_of.setdefault(subscriber, []).append(group)
    by_groups: dict[tuple[int, ...], list[LiveSubscription]] = {}
    for subscriber, wanted in groups_of.items():
        by_groups.setdefault(tuple(wanted), []).append(subscriber)
    found: list[Shared] = []
    for wanted_groups, takers in by_groups.items():
        runs = sorted(run for group in wanted_groups for run in groups[group][1])
        is_all = len(runs) == len(by_run)
        found.append((SharedRuns(shard, stored, None if is_all else runs), takers))
    return found


def spread_kept(
    shard: ShardId,
    stored: VisibleBatch,
    shares: Sequence[Shared],
    fall_behind: FallBehind,
) -> bool:
    """Deliver a stored batch to the subscribers that have room; the others will read it from the log.

    Returns whether any subscriber had room.
    """
    head = stored.envelope
    is_delivered = False
    for share, subscribers in shares:
        for subscriber in subscribers:
            if not subscriber.takes(shard, head):
                if shard not in subscriber.behind():
                    fall_behind(subscriber, shard, head, is_slow=True)
            elif share.needs_unpacking:
                fall_behind(subscriber, shard, head, is_slow=False)
            else:
                delivery = share.delivery()
                subscriber.deliver(delivery, share.envelope)
                is_delivered = True
    return is_delivered


def spread_ephemeral(shares: Sequence[Shared]) -> int:
    """Push a batch of ephemeral topics to its subscribers. Returns how many there are."""
    receivers = 0
    for share, subscribers in shares:
        delivery = share.delivery()
        for subscriber in subscribers:
            subscriber.push(delivery, share.envelope, share.body)
        receivers += len(subscribers)
    return receivers
