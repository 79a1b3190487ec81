"""The model of the log: batches sent, what the log answered, what readers saw. Simple on purpose.

The model never predicts what the log will do. It remembers promises, and says `Violation` when an answer breaks one:

- a batch acknowledged as stored, or seen by any reader, is *required*: it has to be found again, whole, at its offsets;
- an offset, and a position in a shard, names one message for ever; a message has one offset;
- a batch that the log refused for good may never be found; one of unknown fate may, as a whole;
- purged messages, and those of a deleted topic, stay hidden; retention may take only what its policy names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runnel.config import Until
from runnel.formats.message import Message
from runnel.log.log import Appended, Cursor, Level, OffsetBounds, ShardId
from runnel.topics.names import TopicPartition
from runnel.topics.patterns import Pattern
from runnel.topics.policies import Policies
from tests.log.simulation.facts import (
    Dropping,
    Fate,
    Known,
    PartitionModel,
    Sent,
    TopicModel,
    drops,
)
from tests.log.simulation.played_subscription import Subscription
from tests.simulation.history import Violation
from tests.simulation.shards import ShardOf


class Model:
    """The promises that the log has made in this history."""

    def __init__(self, policies: Policies, subscription: Subscription, shard_of: ShardOf) -> None:
        self.policies = policies
        self.subscription = subscription
        self.shard_of = shard_of
        self.sent: list[Sent] = []
        self.topics: dict[str, TopicModel] = {}
        self.partitions: dict[TopicPartition, PartitionModel] = {}
        self.by_payload: dict[bytes, tuple[Sent, int]] = {}
        self.at: dict[bytes, tuple[TopicPartition, int]] = {}  # where a payload was found
        self.positions: dict[tuple[ShardId, int, int], bytes] = {}
        self.cursors: dict[str, list[Cursor | None]] = {}  # what each may be; None: absent
        self._former_cursors: dict[str, list[Cursor | None]] = {}  # what each has been
        self.droppings: dict[ShardId, list[Dropping]] = {}
        self.trimmed: set[str] = set()  # journals
        self.bytes_sent: dict[str, int] = {}  # by journal: limits of bytes are of the journal
        self.lost: set[bytes] = set()  # payloads in bytes that were damaged on purpose
        self.was_resurrected = (
            False  # metadata or a catalogue was damaged: it may have forgotten deletions
        )
        self._cursors_before = self.cursors

    # --- Sending ---

    def topic(self, name: str) -> TopicModel:
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = TopicModel(name, self.policies.for_topic(name))
        return found

    def partition(self, key: TopicPartition) -> PartitionModel:
        found = self.partitions.get(key)
        if found is None:
            found = self.partitions[key] = PartitionModel(key)
        return found

    def keys(self, topic: str) -> list[TopicPartition]:
        return [(topic, number) for number in range(self.topic(topic).policy.partitions)]

    def sending(
        self,
        rows: Sequence[tuple[TopicPartition, bytes]],
        level: Level,
        producer: tuple[str, int, int] | None = None,
    ) -> Sent:
        name, term, sequence = producer or (None, 0, 0)
        sent = Sent(
            number=len(self.sent) + 1,
            keys=[key for key, _ in rows],
            payloads=[payload for _, payload in rows],
            births=[self.topic(key[0]).birth for key, _ in rows],
            shard=self.shard_of(rows[0][0]),
            level=Level.STORED if name else level,
            producer=name,
            term=term,
            sequence=sequence,
        )
        self.sent.append(sent)
        for row, payload in enumerate(sent.payloads):
            self.by_payload[payload] = (sent, row)
            self.partition(sent.keys[row])
        size = sum(map(len, sent.payloads)) + 400
        journal = sent.shard.journal
        self.bytes_sent[journal] = self.bytes_sent.get(journal, 0) + size
        return sent

    def sending_again(self, sent: Sent) -> None:
        """If the topic was deleted since the first sending, the model does not know which topic has the batch."""
        for row, key in enumerate(sent.keys):
            if sent.births[row] != self.topic(key[0]).birth:
                sent.births[row] = None

    def answered(self, sent: Sent, appended: Appended) -> None:
        if appended.is_repeated:
            self._answered_again(sent, appended)
            return
        offsets = _offsets_by_row(sent, appended.base_offsets)
        if sent.offsets is not None and sent.offsets != offsets:
            raise Violation(f"{sent} was told offsets {sent.offsets}, and now {offsets}")
        sent.offsets = offsets
        if appended.level is not Level.STORED:
            sent.fate = Fate.RECEIVED
            return
        sent.fate = Fate.STORED
        for row, offset in enumerate(offsets):
            self._establish(sent, row, offset, appended.receive_time_ns, appended.entry)

    def _answered_again(self, sent: Sent, appended: Appended) -> None:
        if sent.producer is None:
            raise Violation(f"{sent} has no producer, but was answered as a repetition")
        if not appended.base_offsets:
            if not self._may_have_lost_rows(sent):
                raise Violation(f"the repeated {sent} is all there, but got no offsets")
            sent.fate = Fate.UNKNOWN if sent.fate is Fate.PENDING else sent.fate
            return
        offsets = _offsets_by_row(sent, appended.base_offsets)
        if sent.offsets is not None and sent.offsets != offsets:
            raise Violation(f"{sent} lies at {sent.offsets}; its repetition was told {offsets}")
        sent.offsets = offsets
        sent.fate = Fate.STORED
        for row, offset in enumerate(offsets):
            self._establish(sent, row, offset, appended.receive_time_ns, appended.entry)

    def _may_have_lost_rows(self, sent: Sent) -> bool:
        if sent.offsets is None:
            return True
        return sent.shard.journal in self.trimmed or any(
            self._may_be_dropped(sent.shard, key, offset) or self._is_hidden(sent, row, offset)
            for row, (key, offset) in enumerate(zip(sent.keys, sent.offsets, strict=True))
        )

    def refused(self, sent: Sent) -> None:
        """Nothing of it was stored, or will ever be found."""
        if sent.fate is Fate.STORED:
            raise Violation(f"{sent} was acknowledged, and now refused")
        sent.fate = Fate.REFUSED
        sent.offsets = None

    def left_open(self, sent: Sent) -> None:
        """It failed in a way that leaves open what the disk holds."""
        if sent.fate is Fate.STORED:
            raise Violation(f"{sent} was acknowledged, and now failed")
        sent.fate = Fate.UNKNOWN

    def stored_by_now(self, sent: Sent) -> None:
        """A batch that was only received has been synced since."""
        if sent.fate is Fate.RECEIVED and sent.offsets is not None:
            sent.fate = Fate.STORED
            for row, offset in enumerate(sent.offsets):
                self._establish(sent, row, offset, None, None)

    def _establish(
        self, sent: Sent, row: int, offset: int, time_ns: int | None, entry: int | None
    ) -> None:
        """This message has this offset, now and for ever."""
        key, payload = sent.keys[row], sent.payloads[row]
        partition = self.partition(key)
        known = partition.known.get(offset)
        if known is not None and known.sent.payloads[known.row] != payload:
            raise Violation(
                f"{_name(key, offset)} was {known.sent} row {known.row}, and is now {sent} row {row}"
            )
        place = self.at.setdefault(payload, (key, offset))
        if place != (key, offset):
            raise Violation(
                f"{sent} row {row} is at {_name(*place)} and again at {_name(key, offset)}"
            )
        if sent.offsets is not None and sent.offsets[row] != offset:
            raise Violation(f"{sent} row {row} was told {sent.offsets[row]}, and lies at {offset}")
        if known is None:
            known = partition.known[offset] = Known(sent, row, 0, 0)
            topic = self.topic(key[0])
            if sent.births[row] == topic.birth and not topic.is_deleted:
                topic.is_required = True
        if time_ns is not None:
            if known.time_ns and known.time_ns != time_ns:
                raise Violation(f"{_name(key, offset)} has another receive time than before")
            known.time_ns = time_ns
        if entry is not None:
            if known.entry and known.entry != entry:
                raise Violation(f"{_name(key, offset)} was in entry {known.entry}, now in {entry}")
            known.entry = entry
        partition.next_min = max(partition.next_min, offset + 1)
        if sent.births[row] is None or self._is_hidden(sent, row, offset):
            return
        if not self._may_be_dropped(sent.shard, key, offset):
            partition.required.add(offset)

    # --- Hiding and dropping ---

    def _is_hidden(self, sent: Sent, row: int, offset: int) -> bool:
        key = sent.keys[row]
        topic = self.topic(key[0])
        if topic.is_deleted or sent.births[row] not in (topic.birth, None):
            return True
        return offset < self.partition(key).floor

    def purging(self, key: TopicPartition, floor: int) -> None:
        partition = self.partition(key)
        partition.floor_max = max(partition.floor_max, floor)

    def purged(self, key: TopicPartition, floor: int) -> None:
        partition = self.partition(key)
        partition.floor = max(partition.floor, floor)
        partition.required = {offset for offset in partition.required if offset >= floor}

    def deleted(self, name: str) -> None:
        topic = self.topic(name)
        topic.is_deleted = True
        topic.is_required = topic.deletion_is_open = False
        for key, partition in self.partitions.items():
            if key[0] == name:
                partition.required.clear()

    def made_again(self, name: str) -> None:
        topic = self.topic(name)
        topic.is_deleted = False
        topic.birth += 1

    def dropping(self, shard: ShardId, salt: int) -> None:
        below: dict[TopicPartition, int] = {}
        for key, partition in self.partitions.items():
            if self.shard_of(key) == shard:
                below[key] = 1 << 60
                partition.required = {
                    offset for offset in partition.required if not drops(salt, key, offset)
                }
        self.droppings.setdefault(shard, []).append(Dropping(salt, below))

    def dropped(self, shard: ShardId, salt: int, below: dict[TopicPartition, int]) -> None:
        """The rewriting is over: what comes from here on is not touched by it."""
        for dropping in self.droppings[shard]:
            if dropping.salt == salt:
                dropping.below = below

    def _may_be_dropped(self, shard: ShardId, key: TopicPartition, offset: int) -> bool:
        return any(
            drops(dropping.salt, key, offset) and offset < dropping.below.get(key, 0)
            for dropping in self.droppings.get(shard, ())
        )

    # --- Retention ---

    def _is_held(self, key: TopicPartition, offset: int, known: Known, now_ns: int) -> bool:
        policy = self.topic(key[0]).policy
        shard = self.shard_of(key)
        if policy.pin.age_ns is not None and known.time_ns < now_ns - policy.pin.age_ns:
            return False
        if (
            policy.pin.bytes_max is not None
            and self.bytes_sent[shard.journal] > policy.pin.bytes_max
        ):
            return False
        lowest_owed = self.subscription.lowest_owed(key)
        if lowest_owed is not None and offset >= lowest_owed:
            return True
        return self._is_held_by_a_cursor(key, offset, known)

    def _is_held_by_a_cursor(self, key: TopicPartition, offset: int, known: Known) -> bool:
        """Whether a cursor surely holds this message."""
        shard = self.shard_of(key)
        return any(
            all(value is not None and _holds(value, shard, key, offset, known) for value in values)
            for values in self.cursors.values()
        )

    def _may_be_gone(self, key: TopicPartition, offset: int, known: Known, now_ns: int) -> bool:
        """Whether retention may have taken this message, by what its policy says."""
        policy = self.topic(key[0]).policy
        retain = policy.retain
        is_old = retain.age_ns is not None and (
            not known.time_ns or known.time_ns < now_ns - retain.age_ns
        )
        shard = self.shard_of(key)
        is_over = (
            retain.bytes_max is not None
            and shard.journal in self.trimmed
            and self.bytes_sent[shard.journal] > retain.bytes_max
        )
        if (is_old or is_over) and not self._is_held(key, offset, known, now_ns):
            return True
        return (
            retain.until is Until.ACKED
            and shard.journal in self.trimmed
            and self.subscription.has_acked(key, offset)
            and not self._is_held_by_a_cursor(key, offset, known)
        )

    # --- Reading ---

    def saw(
        self, shard: ShardId, message: Message, entry: int, row: int, *, stays: bool = True
    ) -> None:
        """A reader was given this message. A last value may be all that is left of its segment."""
        key = (message.topic, message.partition)
        found = self.by_payload.get(message.payload)
        if found is None:
            raise Violation(f"{_name(key, message.offset)} holds a message that nobody sent")
        sent, sent_row = found
        if sent.keys[sent_row] != key or sent_row != row or sent.shard != shard:
            raise Violation(
                f"{sent} row {sent_row} of {sent.keys[sent_row]} came as row {row} of {key} in {shard}"
            )
        if sent.fate is Fate.REFUSED:
            raise Violation(f"{sent} was refused, but {_name(key, message.offset)} holds it")
        if self._is_hidden(sent, row, message.offset) and not self.was_resurrected:
            raise Violation(f"{_name(key, message.offset)} ({sent}) was purged, but is served")
        place = (shard, entry, row)
        if self.positions.setdefault(place, message.payload) != message.payload:
            raise Violation(f"entry {entry} row {row} of {shard} now names another message: {sent}")
        was_required = message.offset in self.partition(key).required
        self._establish(sent, row, message.offset, message.receive_time_ns, entry)
        if not stays and not was_required:
            self.partition(key).required.discard(message.offset)

    def check_not_expired(self, key: TopicPartition, offset: int, now_ns: int) -> None:
        age_ns = self.topic(key[0]).policy.retain.age_ns
        known = self.partition(key).known[offset]
        if age_ns is None or known.time_ns >= now_ns - age_ns:
            return
        shard = self.shard_of(key)
        lowest_owed = self.subscription.lowest_owed(key)
        # A hold on any message of a run holds the run: be generous by a batch's length.
        if lowest_owed is not None and lowest_owed <= offset + 100:
            return
        if not any(
            value is not None and _holds(value, shard, key, offset + 100, known)
            for values in self.cursors.values()
            for value in values
        ):
            raise Violation(f"{_name(key, offset)} is past its age, but is served")

    def check_partition(
        self,
        key: TopicPartition,
        bounds: OffsetBounds,
        offsets: Sequence[int],
        now_ns: int,
        *,
        has_gaps: bool,
    ) -> None:
        """Reading everything from the first offset on found these."""
        partition = self.partition(key)
        if list(offsets) != sorted(set(offsets)):
            raise Violation(f"{key} was read out of order: {offsets}")
        if offsets and offsets[-1] >= bounds.next_offset:
            raise Violation(f"{key} ends at {bounds.next_offset}, but {offsets[-1]} was read")
        if bounds.first_offset < bounds.next_offset and not has_gaps:
            first = offsets[0] if offsets else None
            if first != bounds.first_offset:
                raise Violation(f"{key} begins at {bounds.first_offset}, but reading found {first}")
        there = set(offsets)
        for offset in sorted(partition.required - there):
            if offset >= bounds.next_offset:
                break  # stored since the bounds were asked for
            known = partition.known[offset]
            payload = known.sent.payloads[known.row]
            is_purged = offset < partition.floor_max and not any(o <= offset for o in there)
            is_gone = self._may_be_gone(key, offset, known, now_ns) or payload in self.lost
            if not is_purged and not is_gone:
                raise Violation(
                    f"{_name(key, offset)} ({known.sent}, entry {known.entry}) is missing; "
                    f"the partition has {bounds.first_offset} to {bounds.next_offset}: {offsets}"
                )
            partition.required.discard(offset)
            partition.gone.add(offset)

    def check_last_may_be_gone(self, key: TopicPartition, offset: int) -> None:
        """The last message of a partition was asked for, and there was none."""
        partition = self.partition(key)
        known = partition.known.get(offset)
        if known is None or known.sent.births[known.row] is None:
            return
        if offset < partition.floor_max or self._is_hidden(known.sent, known.row, offset):
            return
        if offset in partition.required or self.topic(key[0]).policy.last_value:
            raise Violation(f"the last message of {key}, {offset}, was not found")

    def check_entry(self, shard: ShardId, entry: int, rows: list[int], now_ns: int) -> None:
        """An entry was read with these rows; the others must have a reason not to be there."""
        sent = self.by_payload[self.positions[shard, entry, rows[0]]][0]
        base = {sent.keys[row]: self.at[sent.payloads[row]][1] - _rank(sent, row) for row in rows}
        for row, key in enumerate(sent.keys):
            if row in rows or sent.births[row] is None:
                continue
            offset = self._offset_of(sent, row, base)
            if offset is None or self._is_hidden(sent, row, offset):
                continue
            partition = self.partition(key)
            if offset < partition.floor_max or self._may_be_dropped(shard, key, offset):
                continue
            known = partition.known.get(offset) or Known(sent, row, 0, entry)
            if self._may_be_gone(key, offset, known, now_ns) or sent.payloads[row] in self.lost:
                partition.gone.add(offset)
            if offset in partition.gone:
                continue
            raise Violation(f"{sent} is there in part: row {row} ({_name(key, offset)}) is missing")

    def _offset_of(self, sent: Sent, row: int, base: dict[TopicPartition, int]) -> int | None:
        if sent.offsets is not None:
            return sent.offsets[row]
        first = base.get(sent.keys[row])
        return None if first is None else first + _rank(sent, row)

    # --- Cursors ---

    def setting_cursor(self, name: str, value: Cursor | None) -> None:
        self.cursors.setdefault(name, [None]).append(value)

    def cursor_is(self, name: str, value: Cursor | None) -> None:
        """The log has said so."""
        self.cursors[name] = [value]
        self._former_cursors.setdefault(name, []).append(value)

    def check_cursors(self, cursors: Sequence[Cursor]) -> None:
        found = {cursor.name: cursor for cursor in cursors}
        for name in found.keys() - self.cursors.keys():
            raise Violation(f"cursor {name!r} was never set, but is there")
        for name, values in self.cursors.items():
            is_now = found.get(name)
            if not any(_same_cursor(is_now, value) for value in values):
                raise Violation(f"cursor {name!r} is {is_now}, not one of {values}")
            self.cursors[name] = [is_now]

    # --- Damage ---

    def metadata_was_damaged(self) -> None:
        """It may have forgotten what only it knew. Topics with messages, and all numbers, lie in the shards."""
        self.was_resurrected = True
        self._cursors_before = dict(self.cursors)
        for name, values in self.cursors.items():
            # Without its last record it is what it was before.
            self.cursors[name] = [*values, *self._former_cursors.get(name, ()), None]
        for topic in self.topics.values():
            topic.is_required = False

    def catalogue_was_damaged(self) -> None:
        """The catalogue of a shard may have forgotten what only it knew; what lies in segments it must not lose."""
        self.was_resurrected = True
        kept: set[bytes] = set()
        for partition in self.partitions.values():
            partition.next_min = max(partition.required, default=0) + 1
            partition.known = {offset: partition.known[offset] for offset in partition.required}
            kept |= {known.sent.payloads[known.row] for known in partition.known.values()}
        # Nothing else knows the numbers that retention took: the log may give them again.
        self.at = {payload: place for payload, place in self.at.items() if payload in kept}
        self.positions = {
            place: payload for place, payload in self.positions.items() if payload in kept
        }

    def check_cursors_were_kept(self, cursors: Sequence[Cursor]) -> None:
        self.cursors = self._cursors_before
        self.check_cursors(cursors)

    def is_any_required(self, payloads: Iterable[bytes]) -> bool:
        """Whether a reader of everything must have met one of these."""
        for payload in payloads:
            key, offset = self.at.get(payload, (("", 0), 0))
            if offset in self.partition(key).required:
                return True
        return False

    # --- Restarting ---

    def restarted(self) -> None:
        """The process has ended: batches without an answer will get none."""
        for sent in self.sent:
            if sent.fate in (Fate.PENDING, Fate.RECEIVED):
                sent.fate = Fate.UNKNOWN

    def check_topics(self, names: Iterable[str]) -> None:
        """After a restart: deletions that were under way have happened or not."""
        found = set(names)
        for name in sorted(found - self.topics.keys()):
            raise Violation(f"topic {name!r} was never published to, but is there")
        for name, topic in self.topics.items():
            if name in found:
                if topic.is_deleted and not self.was_resurrected:
                    raise Violation(f"topic {name!r} was deleted, but is there")
                topic.deletion_is_open = False
            elif topic.deletion_is_open:
                self.deleted(name)
            elif topic.is_required and not topic.is_deleted:
                raise Violation(f"topic {name!r} is gone, and nobody deleted it")


def _offsets_by_row(sent: Sent, bases: Sequence[int]) -> list[int]:
    """A batch's runs are its neighbours of one key."""
    offsets: list[int] = []
    runs = iter(bases)
    last: TopicPartition | None = None
    for key in sent.keys:
        if key != last:
            base = next(runs, None)
            if base is None:
                raise Violation(f"{sent} was told too few offsets: {list(bases)}")
            offsets.append(base)
        else:
            offsets.append(offsets[-1] + 1)
        last = key
    if next(runs, None) is not None:
        raise Violation(f"{sent} was told too many offsets: {list(bases)}")
    return offsets


def _holds(cursor: Cursor, shard: ShardId, key: TopicPartition, offset: int, known: Known) -> bool:
    for place in cursor.positions:
        if place.topic is not None:
            if (place.topic, place.partition) == key and offset >= place.offset:
                return True
        elif (
            place.shard == shard
            and place.position is not None
            and known.entry >= place.position.entry
            and any(Pattern(text).matches(key[0]) for text in place.patterns)
        ):
            return True
    return False


def _rank(sent: Sent, row: int) -> int:
    """How many rows of the same partition come before it: a batch may have several runs of one."""
    return sum(key == sent.keys[row] for key in sent.keys[:row])


def _same_cursor(one: Cursor | None, other: Cursor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.positions == other.positions


def _name(key: TopicPartition, offset: int) -> str:
    return f"{key[0]}[{key[1]}]@{offset}"
