"""A subscription as a history plays it: what it acknowledges, what it owes, and what it writes down of that.

It covers some topics from the first message on, and outlives the processes of the log. What it has written down, and
was told is stored, has to be found by the next process; what it never wrote down must not be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from runnel.errors import RunnelError, UnknownTopicError
from runnel.log.log import Hold, ShardId, StateStore
from runnel.topics.names import TopicPartition
from tests.simulation.history import Violation
from tests.simulation.shards import ShardOf

if TYPE_CHECKING:
    from tests.log.simulation.history import History

_ENDLESS = 2**62


class Subscription:
    """The holds on the log, and the user of its state journals."""

    def __init__(self, covered: Collection[str], shard_of: ShardOf) -> None:
        self.covered = covered
        self.version = 0
        self._shard_of = shard_of
        self._acked: dict[TopicPartition, set[int]] = {}
        self._stored: dict[TopicPartition, set[int]] = {}

    def ack(self, key: TopicPartition, offsets: Iterable[int]) -> bytes:
        """The content to write down."""
        new = sorted(offsets)
        self._acked.setdefault(key, set()).update(new)
        self.version += 1
        return _content(key, new)

    def stored(self, key: TopicPartition, offsets: Iterable[int]) -> None:
        self._stored.setdefault(key, set()).update(offsets)

    def has_acked(self, key: TopicPartition, offset: int) -> bool:
        return offset in self._acked.get(key, ())

    def lowest_owed(self, key: TopicPartition) -> int | None:
        """None: it does not cover this partition."""
        if key[0] not in self.covered:
            return None
        return next(offset for offset in range(1, _ENDLESS) if not self.has_acked(key, offset))

    # --- For the log ---

    @property
    def is_empty(self) -> bool:
        return not self.covered

    def holds_of(self, key: TopicPartition) -> list[Hold]:
        lowest = self.lowest_owed(key) if key[0] in self.covered else None
        return [] if lowest is None else [Hold("subscription", key, lowest, 0, ())]

    def owed(self, key: TopicPartition, begin: int, end: int) -> list[tuple[int, int]] | None:
        if key[0] not in self.covered:
            return None
        offsets = range(begin, end)
        return [(offset, offset + 1) for offset in offsets if not self.has_acked(key, offset)]

    def snapshot(self, shard: ShardId) -> list[bytes]:
        ours = [key for key in self._acked if self._shard_of(key) == shard]
        return [_content(key, sorted(self._acked[key])) for key in ours]

    def check_state(self, shard: ShardId, contents: Sequence[bytes], *, is_damaged: bool) -> None:
        """A process found these in the shard's state journal."""
        found: dict[TopicPartition, set[int]] = {}
        for content in contents:
            key, offsets = _parsed(content)
            if self._shard_of(key) != shard:
                raise Violation(f"state of {key} was found in {shard}")
            found.setdefault(key, set()).update(offsets)
        for key, offsets in found.items():
            if unknown := offsets - self._acked.get(key, set()):
                raise Violation(f"{key}: {sorted(unknown)} were never acknowledged, but are stored")
        for key, stored in self._stored.items():
            missing = stored - found.get(key, set())
            if missing and self._shard_of(key) == shard and not is_damaged:
                raise Violation(f"{key}: stored acknowledgements are lost: {sorted(missing)}")


def _content(key: TopicPartition, offsets: Sequence[int]) -> bytes:
    return "\t".join((key[0], str(key[1]), *map(str, offsets))).encode()


def _parsed(content: bytes) -> tuple[TopicPartition, set[int]]:
    topic, partition, *offsets = content.decode().split("\t")
    return (topic, int(partition)), set(map(int, offsets))


def attach(history: History) -> None:
    """A process of the log has begun."""
    for shard in dict.fromkeys(
        history.model.shard_of(key)
        for topic in history.subscription.covered
        for key in history.model.keys(topic)
    ):
        _state(history, shard)


def _state(history: History, shard: ShardId) -> StateStore | None:
    """The state of a shard, read as soon as the log has it; None: no topic of the shard exists yet."""
    subscription, is_damaged = history.subscription, history.is_damaged
    try:
        state = history.log.shard(shard).state
    except UnknownTopicError:
        subscription.check_state(shard, (), is_damaged=is_damaged)
        return None
    if state.snapshot is None:
        subscription.check_state(shard, state.contents, is_damaged=is_damaged)
        state.contents.clear()
        state.snapshot = lambda: subscription.snapshot(shard)
    return state


async def acknowledge(history: History) -> None:
    """Some messages of a partition, or all but a few of them."""
    random, model, subscription = history.random, history.model, history.subscription
    keys = [
        key
        for key, part in model.partitions.items()
        if part.known and key[0] in subscription.covered
    ]
    if not keys:
        return
    key = random.choice(sorted(keys))
    known = sorted(model.partition(key).known)
    share = random.choice((0.2, 0.9, 1.0))
    offsets = [offset for offset in known if random.random() < share]
    history.say(f"acknowledge {key[0]}[{key[1]}] {offsets} …")
    state = _state(history, model.shard_of(key))
    if state is None:
        if history.is_damaged:
            return  # no topic of the shard was left
        raise Violation(f"{key} has messages, but the log does not know its shard")
    content = subscription.ack(key, offsets)
    try:
        await history.patiently(state.add(content), "ack")
    except (OSError, RunnelError) as error:
        history.accept_failure(error)
    else:
        subscription.stored(key, offsets)
