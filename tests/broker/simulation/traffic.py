"""Messages on their way into the broker: published in batches or one by one, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runnel.broker.broker import Level, Published
from runnel.errors import MovedError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from runnel.log.log import ShardId
from runnel.topics.names import TopicPartition
from tests.broker.simulation import checks
from tests.broker.simulation.plan import GROUPS, KEPT_GROUPS, LIVE_GROUPS
from tests.fakes.losing_log import is_away
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.broker.simulation.history import History

Runs = Sequence[tuple[TopicPartition, list[bytes]]]


class Traffic:
    """No task waits for the answers; the history looks at them now and then."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.messages = 0
        # What each answer will mean: the offsets up to which partitions are stored then.
        self._answers: dict[asyncio.Future[Published], dict[TopicPartition, int]] = {}

    @property
    def is_answered(self) -> bool:
        return not self._answers

    def _drawn_runs(self, group: str) -> list[tuple[TopicPartition, list[bytes]]]:
        keys = self._history.model.keys(GROUPS[group])
        chosen = sorted(
            self._history.random.sample(keys, self._history.random.randint(1, min(3, len(keys))))
        )
        runs = []
        for key in chosen:
            count = self._history.random.randint(1, 4)
            payloads = [b"%s %d" % (key[0].encode(), self.messages + n) for n in range(count)]
            self.messages += count
            runs.append((key, payloads))
        return runs

    def _by_shard(self, runs: Runs) -> Sequence[Runs]:
        """The runs of each shard: a batch goes to one."""
        found: dict[ShardId, list[tuple[TopicPartition, list[bytes]]]] = {}
        for run in runs:
            found.setdefault(self._history.shard_of(run[0]), []).append(run)
        return list(found.values())

    def _batch(self, runs: Runs) -> Batch:
        codec = self._history.random.choice((Codec.NONE, Codec.NONE, Codec.NONE, Codec.LZ4))
        return Batch.from_messages(
            [
                Message(topic, payload, partition=number)
                for (topic, number), payloads in runs
                for payload in payloads
            ],
            codec=codec,
        )

    async def publish(self) -> None:
        group = self._history.random.choice(KEPT_GROUPS)
        for _ in range(self._history.random.choice((1, 1, 1, 4))):
            runs = self._drawn_runs(group)
            level = self._history.random.choice((None, Level.STORED, Level.RECEIVED, Level.NONE))
            self._history.say(f"publish {_told(runs)} at level {level}")
            self._history.model.publish(
                runs, self._history.now_ns
            )  # first: in memory it is delivered at once
            for some in self._by_shard(runs):
                try:
                    answer = self._history.broker.publish(self._batch(some), level)
                except MovedError:
                    self._history.refused(some)
                else:
                    self._history.accepted(some)
                    self._note(answer, some)

    async def send(self) -> None:
        """Single messages of one wake-up, which the broker gathers into one run of each partition."""
        group = self._history.random.choice(KEPT_GROUPS)
        runs = self._drawn_runs(group)
        self._history.say(f"send {_told(runs)}")
        self._history.model.publish(runs, self._history.now_ns)
        sent = [
            (
                some,
                [
                    self._history.broker.send(
                        Message(topic, payload), Level.STORED, partition=number
                    )
                    for (topic, number), payloads in some
                    for payload in payloads
                ],
            )
            for some in self._by_shard(runs)
        ]
        if self._history.random.random() < 0.2:  # before they are published
            await self._history.lose_shard(GROUPS[group][0])
        await asyncio.sleep(0)
        for some, answers in sent:
            if any(answer.done() and answer.exception() is not None for answer in answers):
                for answer in answers:
                    if not isinstance(answer.exception(), MovedError):
                        raise Violation(f"only a part of {_told(some)} was refused")
                self._history.refused(some)
            else:
                self._answers |= {answer: {} for answer in answers}

    async def publish_elsewhere(self) -> None:
        """While a shard on disk is away, its other owner stores messages there."""
        history = self._history
        log = history.main
        known = [key for key in history.model.keys(history.model.existing) if is_away(log, key)]
        known = [key for key in known if not history.is_in_memory(key[0])]
        if known:
            runs = [(history.random.choice(known), [b"elsewhere %d" % self.messages])]
            self.messages += 1
            history.say(f"another owner stores {_told(runs)}")
            history.model.publish(runs, history.now_ns)
            await history.patiently(log.store_elsewhere(self._batch(runs)), "storing elsewhere")
            for key, _ in runs:
                history.model.stored(key, history.model.partition(key).next_offset)

    def _note(self, answer: asyncio.Future[Published], runs: Runs) -> None:
        self._answers[answer] = {
            key: self._history.model.partition(key).next_offset for key, _ in runs
        }
        if self._history.is_in_memory(runs[0][0][0]):
            for key, _ in runs:
                self._history.model.stored(key, self._history.model.partition(key).next_offset)

    def look_at_answers(self) -> None:
        """What is known to be stored: publishers were told so."""
        for answer, ends in list(self._answers.items()):
            if answer.done():
                del self._answers[answer]
                published = answer.result()
                if published.level is Level.STORED:
                    for key, end in ends.items():
                        self._history.model.stored(key, end)

    async def publish_live(self) -> None:
        group = self._history.random.choice(LIVE_GROUPS)
        runs = self._drawn_runs(group)
        self._history.say(f"publish {_told(runs)}, which is not kept")
        before = [each for each in self._history.readers if each.subscription is not None]
        answer = await self._history.patiently(
            self._history.broker.publish(self._batch(runs)), "publishing"
        )
        for (key, payloads), base in zip(runs, answer.base_offsets, strict=True):
            epoch = checks.live_epoch(self._history, key[0])
            for reader in self._history.readers:
                if not reader.matches(key[0]) or reader.error is not None:
                    continue
                is_sure = reader in before and reader.subscription is not None
                if epoch is not None and base:
                    reader.live.setdefault(key, {}).update(
                        {(epoch, base + n): is_sure for n in range(len(payloads))}
                    )
                elif is_sure:
                    raise Violation(f"{reader} reads {key}, which does not exist")


def _told(runs: Runs) -> str:
    return ", ".join(f"{len(payloads)} to {topic}[{number}]" for (topic, number), payloads in runs)
