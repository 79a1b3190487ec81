"""Batches that a history sends, by anonymous and by named publishers, and the answers that it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from runnel.errors import BusyError, DiskFullError, ProducerFault, RunnelError, Unavailable
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.log.log import Appended, Level, ShardId
from runnel.topics.names import TopicPartition
from tests.fakes.power import PowerLoss
from tests.log.simulation.clients import ProducerClient
from tests.log.simulation.facts import Fate, Sent
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.log.simulation.history import History

Rows = list[tuple[TopicPartition, bytes]]


class Traffic:
    """What is in flight. Nothing here waits but `append_surely`."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._random = history.random
        self._model = history.model
        plan = history.plan
        self.clients = [
            ProducerClient(name, self._random.choice(plan.topics), self._model)
            for name in plan.producers
        ]
        self.in_flight: dict[asyncio.Future[Appended], Sent] = {}
        self._payload_count = 0

    # --- Drawing ---

    def _payload(self) -> bytes:
        self._payload_count += 1
        filler = b"x" * self._random.choice((0, 5, 50, 50, 400))
        return b"%d %s" % (self._payload_count, filler)

    def draw_rows(self, topic: str, shard: ShardId | None = None) -> Rows:
        """Messages of this topic first, then perhaps of others in its shard."""
        random = self._random
        topics = self._history.plan.topics
        rows: Rows = []
        for _ in range(random.choice((1, 1, 2, 4))):
            name = (
                random.choice([name for name in topics if self._keys(name, shard)])
                if rows
                else topic
            )
            self.publishing_to(name)
            key = random.choice(self._keys(name, shard))
            shard = self._model.shard_of(key)
            rows += [(key, self._payload()) for _ in range(random.choice((1, 1, 3)))]
        return rows

    def _keys(self, topic: str, shard: ShardId | None) -> list[TopicPartition]:
        """The topic's partitions in a shard, or all of them."""
        keys = self._model.keys(topic)
        return [key for key in keys if shard is None or self._model.shard_of(key) == shard]

    def new_batch(self) -> tuple[Sent, Batch]:
        rows = self.draw_rows(self._random.choice(self._history.plan.topics))
        level = self._random.choice((Level.STORED, Level.STORED, Level.RECEIVED, Level.NONE))
        return self._model.sending(rows, level), batch_of(rows)

    def publishing_to(self, name: str) -> None:
        """Publishing makes a deleted topic again."""
        if self._model.topic(name).is_deleted:
            self._model.made_again(name)

    # --- Sending ---

    def give(self, sent: Sent, batch: Batch) -> bool:
        """Whether the log took it."""
        self._history.say(f"append {sent} {sent.level}: {summary(sent)}")
        try:
            future = self._history.log.append(batch, sent.level)
        except Unavailable as error:
            self._not_taken(error)
            self._model.refused(sent)
            return False
        self.in_flight[future] = sent
        return True

    def give_named(self, client: ProducerClient, sent: Sent) -> bool:
        for name, _ in sent.keys:
            self.publishing_to(name)
        self._model.sending_again(sent)
        rows = list(zip(sent.keys, sent.payloads, strict=True))
        self._history.say(f"append {sent}: {summary(sent)}")
        try:
            future = self._history.log.append(
                batch_of(rows, (client.name, sent.term, sent.sequence))
            )
        except Unavailable as error:
            self._not_taken(error)
            client.not_taken(sent)
            return False
        except ProducerFault as error:
            # Right only if a batch before it has failed, which its publisher has not heard yet.
            if not client.has_unheard_failure(self.in_flight):
                raise Violation(f"{sent} is next, but: {error}") from error
            self._history.say(f"      {error}")
            client.not_taken(sent)
            return False
        if sent.fate is not Fate.STORED:
            sent.fate = Fate.PENDING
        self.in_flight[future] = sent
        return True

    def _not_taken(self, error: Unavailable) -> None:
        if isinstance(error, BusyError):
            self._history.say("      busy")
        else:
            self._history.accept_failure(error)

    async def append_surely(self) -> None:
        """When all is well, a batch is stored."""
        sent, batch = self.new_batch()
        self._history.say(f"append {sent}, which must succeed: {summary(sent)}")
        medium = self._history.medium
        was_well = medium is None or medium.is_well
        if medium is not None:
            medium.is_well = True
        appended = await self._history.patiently(self._history.log.append(batch), "append")
        self._model.answered(sent, appended)
        if medium is not None:
            medium.is_well = was_well

    # --- Answers ---

    def look_at_answers(self) -> None:
        """Whatever has been answered since the last look."""
        for future in [future for future in self.in_flight if future.done()]:
            sent = self.in_flight.pop(future)
            if future.cancelled():
                raise Violation(f"{sent} was cancelled by the log")
            error = future.exception()
            if error is None:
                self._answered(sent, future.result())
            else:
                self._failed(sent, error)
            for client in self.clients:
                client.heard(sent, is_stored=error is None)

    def _answered(self, sent: Sent, appended: Appended) -> None:
        repeated = " repeated" if appended.is_repeated else ""
        offsets = ", ".join(map(str, appended.base_offsets))
        self._history.say(f"   {sent} is {appended.level}{repeated} at {offsets}")
        self._model.answered(sent, appended)

    def _failed(self, sent: Sent, error: BaseException) -> None:
        self._history.accept_failure(error)
        if sent.fate is Fate.STORED and sent.producer is not None:
            return  # a repetition failed; the first answer stands
        if isinstance(error, DiskFullError) or self._history.is_loss(error):
            self._model.refused(sent)
        elif isinstance(error, (RunnelError, PowerLoss)):
            self._model.left_open(sent)
        else:
            raise Violation(f"{sent} failed with {error!r}")

    def failed_batches(self) -> int:
        return sum(shard.failed_batches for shard in self._history.log.statistics().shards)

    def all_is_stored(self) -> None:
        """A clean close: what was only received has been stored too."""
        for sent in self._model.sent:
            self._model.stored_by_now(sent)

    def check_all_answered(self) -> None:
        for future, sent in self.in_flight.items():
            if not future.done():
                raise Violation(f"{sent} was never answered")

    def check_answered_after_sync(self) -> None:
        """No publisher waits any more, except for repetitions that are looked up."""
        for future, sent in self.in_flight.items():
            if not future.done() and sent.producer is None:
                raise Violation(f"{sent} is not answered after a sync")

    def process_ended(self) -> None:
        self.look_at_answers()
        self.in_flight.clear()
        self._model.restarted()
        for client in self.clients:
            client.restarted()


def batch_of(
    rows: Sequence[tuple[TopicPartition, bytes]], producer: tuple[str, int, int] | None = None
) -> Batch:
    messages = [Message(key[0], payload, partition=key[1]) for key, payload in rows]
    if producer is None:
        return Batch.from_messages(messages)
    name, term, number = producer
    return Batch.from_messages(messages, producer=name, term=term, number=number)


def summary(sent: Sent) -> str:
    """The runs of a batch, for the transcript."""
    runs: list[list[TopicPartition]] = []
    for key in sent.keys:
        if runs and runs[-1][0] == key:
            runs[-1].append(key)
        else:
            runs.append([key])
    return ", ".join(f"{len(run)} to {run[0][0]}[{run[0][1]}]" for run in runs)
