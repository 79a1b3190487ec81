"""The ids of a live stream's events: text that a client keeps, and gives back to resume after that event.

An id encodes a `ReadPosition`: with wildcards the next entry of each shard, otherwise the next offset of each
partition. Every message has one, so most of its text is made once for many messages:

    positions . entry . row       with wildcards: the next entry of the first shard in `positions`, and the row in it
    positions . offset            otherwise: the next offset of the first partition in `positions`
    positions ~ token . count     while last values come: how many of a list that the broker remembers have been sent
    positions ~ digests           the same as earlier versions wrote it: a digest of each last value that has been sent

`positions` is msgpack in base64. Users treat an id as opaque. The listener checks every id that comes back. An id does
not say which topics may be read: the patterns of the request do.
"""

from __future__ import annotations

import binascii
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal

import msgspec
import xxhash

from runnel.formats.batch import Batch, Run
from runnel.formats.heads import Natural, PartitionPlace, ShardPlace, Start
from runnel.formats.wire import GapState
from runnel.protocols.http.encoding.problems import FieldFault
from runnel.protocols.http.encoding.sent_last_values import SentLists
from runnel.topics.names import LIVE_JOURNAL
from runnel.topics.patterns import Pattern
from runnel.topics.read_position import ReadPosition, resume_at

ID_CHARS_MAX: Final = 4096
"""Common proxies would refuse a header with a longer id. Events that would need one have no id."""

FIELD: Final = "last_event_id"
_POSITIONS_MAX: Final = ID_CHARS_MAX * 3 // 4 // 5  # a position has five bytes or more
_DIGEST_CHARS: Final = 11  # of DIGEST_BYTES in base64, without padding
_NUMBER_MAX: Final = 2**63 - 1
_FROM_URL: Final = str.maketrans(
    "-_+/", "+/!!"
)  # our ids have the URL alphabet only: `+` and `/` become invalid


class _Packed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The content of `positions`. The numbers of the first position may follow in the text instead."""

    version: Literal[1]
    patterns: int  # a checksum: resuming with other patterns would miss messages
    is_last: bool  # more last values follow
    shards: Sequence[ShardPlace] = ()
    partitions: Sequence[tuple[Natural, Natural, Natural, Natural]] = ()
    """Number of the topic among the patterns, partition, epoch, offset."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Packed).decode


class EventIds:
    """Makes the ids of one stream's events. Its position moves with the messages that are written."""

    def __init__(
        self,
        patterns: Sequence[str],
        start: Start,
        lists: SentLists,
        seen: Collection[bytes] = (),
    ) -> None:
        """`seen`: the last values that were sent before, if the stream resumes after an id."""
        topics = _topics(patterns)
        self._numbers: Final = {topic: number for number, topic in enumerate(topics)}
        self._checksum: Final = _checksum(topics)
        # Positions become neither fewer nor shorter: once they are too long, they are not encoded again.
        self._is_too_long = False
        self._position: Final = ReadPosition(patterns, start)
        self._seen_before: Final = frozenset(seen)
        self._sent = lists.begin(self._seen_before)

    @property
    def awaits_last_values(self) -> bool:
        return self._position.awaits_last_values

    def begin(self, shards: Sequence[ShardPlace], partitions: Sequence[PartitionPlace]) -> None:
        """Take over where the broker begins. Partitions and shards that it does not name stay as they are."""
        self._position.begin(partitions, shards)

    def last_sent(self) -> None:
        """All last values have been sent."""
        self._position.awaits_last_values = False

    def current(self) -> str | None:
        """The id after all events so far. None: it would be too long."""
        return self._id(self._text())

    # --- Messages ---

    def last_values(self, batch: Batch) -> Iterator[tuple[bool, str | None]]:
        """For each message of a batch of last values: whether it came before, and its id."""
        text = self._text()
        for run in batch.runs():
            for offset in range(run.base_offset, run.base_offset + run.count):
                digest = _digest(run, offset)
                if digest in self._seen_before:
                    yield True, None
                    continue
                # Without room to remember it, events have no id until all last values have been sent.
                yield False, self._id(text) if self._sent.add(digest) else None

    def ids(
        self, batch: Batch, journal: str, shard: int, epoch: int, next_entry: int, *, is_whole: bool
    ) -> Iterator[str | None]:
        """The ids of messages that are not last values. `is_whole`: the next entry of their shard comes after them.

        Messages of ephemeral topics have no id: a stream cannot resume there.
        """
        if journal == LIVE_JOURNAL:
            return iter([None] * len(batch))
        if self._position.is_by_partition:
            return self._of_partitions(batch)
        return self._of_shard(batch, journal, shard, epoch, next_entry, is_whole=is_whole)

    def _of_shard(
        self, batch: Batch, journal: str, shard: int, epoch: int, next_entry: int, *, is_whole: bool
    ) -> Iterator[str | None]:
        key, shards = (journal, shard), self._position.shards
        shards.pop(key, None)
        text = self._text(ShardPlace(journal, shard, epoch, 0))
        runs = batch.runs()
        end = runs[-1].entry, runs[-1].row + runs[-1].count
        shards[key] = ShardPlace(journal, shard, epoch, *((next_entry, 0) if is_whole else end))
        left = len(batch)
        for run in runs:
            for row in range(run.row + 1, run.row + run.count + 1):
                left -= 1
                if left or not is_whole:
                    yield self._id(text, f".{run.entry}.{row}")
                else:
                    yield self._id(text, f".{next_entry}.0")

    def _of_partitions(self, batch: Batch) -> Iterator[str | None]:
        partitions = self._position.partitions
        for run in batch.runs():
            key = (run.topic, run.partition)
            partitions.pop(key, None)
            text = self._text(PartitionPlace(run.topic, run.partition, 0, run.epoch))
            end = run.base_offset + run.count
            partitions[key] = end, run.epoch
            for offset in range(run.base_offset + 1, end + 1):
                yield self._id(text, f".{offset}")

    def missed(self, gap: GapState) -> str | None:
        """Move behind messages that will not come. The id after them, if the stream stands before them."""
        return self.current() if self._position.missed(gap) else None

    def passed(self, journal: str, shard: int, epoch: int, next_entry: int) -> str | None:
        """Move behind a part of a shard that will not come. The id after it."""
        self._position.delivered(journal, shard, epoch, next_entry, ())
        return self.current()

    # --- Text ---

    def _text(self, first: ShardPlace | PartitionPlace | None = None) -> str | None:
        """`positions`, with this one before all others. None: they are too many."""
        position = self._position
        known = position.partitions if position.is_by_partition else position.shards
        if self._is_too_long or len(known) > _POSITIONS_MAX:
            return None
        shards: list[ShardPlace] = []
        partitions: list[tuple[int, int, int, int]] = []
        if position.is_by_partition:
            numbers = self._numbers
            if isinstance(first, PartitionPlace):
                partitions = [(numbers[first.topic], first.partition, first.epoch, first.offset)]
            partitions += [
                (numbers[topic], partition, epoch, offset)
                for (topic, partition), (offset, epoch) in position.partitions.items()
            ]
        else:
            shards = [first] if isinstance(first, ShardPlace) else []
            shards += position.shards.values()
        packed = _encode(
            _Packed(1, self._checksum, position.awaits_last_values, shards, partitions)
        )
        text = urlsafe_b64encode(packed).decode().rstrip("=")
        self._is_too_long = len(text) > ID_CHARS_MAX
        return None if self._is_too_long else text

    def _id(self, text: str | None, numbers: str = "") -> str | None:
        if text is None:
            return None
        whole = text + numbers
        if self._position.awaits_last_values and len(self._sent):
            whole += f"~{self._sent.token}.{len(self._sent)}"
        return whole if len(whole) <= ID_CHARS_MAX else None


def resumed(
    text: str, patterns: Sequence[str], lists: SentLists
) -> tuple[Start, Collection[bytes]]:
    """The start that resumes after an id, and the last values that were sent before it. FieldFault: it is no id."""
    try:
        if len(text) > ID_CHARS_MAX:
            raise ValueError
        positions, numbers, seen = _parts(text)
        decoded = _decode(positions)
        sent = _seen(seen, lists) if decoded.is_last else ()
        topics = _topics(patterns)
        if decoded.patterns != _checksum(topics):
            raise FieldFault(
                FIELD,
                "this is the id of a stream with other patterns: it goes on with its own alone",
            )
        shards = [*decoded.shards]
        partitions = [
            PartitionPlace(topics[number], partition, offset, epoch)
            for number, partition, epoch, offset in decoded.partitions
        ]
        match numbers:
            case []:
                pass
            case [entry, row]:
                shards[0] = msgspec.structs.replace(shards[0], entry=entry, row=row)
            case [offset]:
                partitions[0] = msgspec.structs.replace(partitions[0], offset=offset)
            case _:
                raise ValueError
    except (ValueError, IndexError, binascii.Error, msgspec.MsgspecError):
        raise FieldFault(
            FIELD,
            f"{text[:80]!r} is no id of an event of this stream; give one as it came, or none",
        ) from None
    return resume_at(partitions, shards, awaits_last_values=decoded.is_last), sent


def _parts(text: str) -> tuple[bytes, list[int], str]:
    text, _, seen = text.partition("~")
    positions, *digits = text.split(".")
    return _from_base64(positions), [_number(each) for each in digits], seen


def _seen(text: str, lists: SentLists) -> Collection[bytes]:
    token, dot, count = text.partition(".")
    if dot:
        return lists.recall(token, _number(count))
    if len(text) % _DIGEST_CHARS:
        raise ValueError
    return [
        _from_base64(text[at : at + _DIGEST_CHARS]) for at in range(0, len(text), _DIGEST_CHARS)
    ]


def _number(digits: str) -> int:
    if not (digits.isascii() and digits.isdecimal()) or int(digits) > _NUMBER_MAX:
        raise ValueError
    return int(digits)


def _from_base64(text: str) -> bytes:
    packed = text.translate(_FROM_URL) + "=" * (-len(text) % 4)
    return binascii.a2b_base64(packed, strict_mode=True)


def _topics(patterns: Sequence[str]) -> list[str]:
    """The patterns, sorted. A pattern that matches a single name, such as `a/[*]`, is given as that name."""
    parsed = map(Pattern, patterns)
    return sorted({each.prefix if each.is_literal else each.text for each in parsed})


def _checksum(topics: Sequence[str]) -> int:
    return zlib.crc32("\0".join(topics).encode("utf-8", "surrogatepass"))


def _digest(run: Run, offset: int) -> bytes:
    named = f"{run.topic}\0{run.partition}\0{run.epoch}\0{offset}"
    return xxhash.xxh3_64_digest(named.encode())
