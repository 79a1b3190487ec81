"""Where a live stream stands, as its events' ids say it: text that a client keeps, and gives back to go on there.

An id is a place for everything that the stream's patterns may match: with wildcards one for every shard, otherwise one
for every partition of the topics. It is short and made for every message, so most of it is made once for many:

    places . entry . row          with wildcards: the next entry of the first shard in `places`, and the row in it
    places . offset               otherwise: the next offset of the first partition in `places`
    places ~ token . count        while last values come: the first so many of a list that the broker remembers
    places ~ digests              the same as earlier versions wrote it: those that have come, a digest each

`places` is msgpack in base64. To users all of it is opaque; what comes back is checked, and does not say which topics
may be read: the patterns of the request do.
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
from runnel.protocols.http.problems import FieldFault
from runnel.protocols.http.sent_last_values import SentLists
from runnel.topics.names import LIVE_JOURNAL
from runnel.topics.patterns import Pattern

ID_CHARS_MAX: Final = 4096
"""Longer ids would not pass through common proxies, as a header; events that would need one have none."""

FIELD: Final = "last_event_id"
_PLACES_MAX: Final = ID_CHARS_MAX * 3 // 4 // 5  # a place has five bytes or more
_DIGEST_CHARS: Final = 11  # of DIGEST_BYTES in base64, without padding
_NUMBER_MAX: Final = 2**63 - 1
_FROM_URL: Final = str.maketrans("-_+/", "+/!!")  # the other alphabet is none of ours


class _Places(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What `places` holds. The numbers of the first one may stand behind it instead."""

    version: Literal[1]
    patterns: int  # a checksum: an id of other patterns would leave something out
    is_last: bool  # last values had not all come
    shards: Sequence[ShardPlace] = ()
    partitions: Sequence[tuple[Natural, Natural, Natural, Natural]] = ()
    """Number of the topic among the patterns, partition, epoch, offset."""


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Places).decode


class Position:
    """Of one stream. It moves on as messages are written, and says so in their ids."""

    def __init__(
        self,
        patterns: Sequence[str],
        start: Start,
        lists: SentLists,
        seen: Collection[bytes] = (),
    ) -> None:
        """`seen`: the last values that came before, if the stream resumes after an id."""
        topics = _topics(patterns)
        self._numbers: Final = {topic: number for number, topic in enumerate(topics)}
        self._checksum: Final = _checksum(topics)
        # Places become neither fewer nor shorter: once they are too long, they are not looked at again.
        self._is_too_long = False
        self._is_by_partition: Final = all(Pattern(pattern).is_literal for pattern in patterns)
        self._is_last = start.kind in ("last", "resume_last")
        self._seen_before: Final = frozenset(seen)
        self._sent = lists.begin(self._seen_before)
        self._shards = {(place.journal, place.shard): place for place in start.shards}
        self._partitions = {(place.topic, place.partition): place for place in start.partitions}

    @property
    def is_last(self) -> bool:
        """Whether last values are still coming."""
        return self._is_last

    def begin(self, shards: Sequence[ShardPlace], partitions: Sequence[PartitionPlace]) -> None:
        """Take over where the broker says it begins; what it says nothing of stays."""
        self._shards.update({(place.journal, place.shard): place for place in shards})
        self._partitions.update({(place.topic, place.partition): place for place in partitions})

    def last_sent(self) -> None:
        """All last values have come."""
        self._is_last = False

    def current(self) -> str | None:
        """The id of everything so far; None: it would be too long."""
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
                # Without room to remember it there are no ids until all have come.
                yield False, self._id(text) if self._sent.add(digest) else None

    def ids(
        self, batch: Batch, journal: str, shard: int, epoch: int, next_entry: int, *, is_whole: bool
    ) -> Iterator[str | None]:
        """The ids of messages that are not last values. `is_whole`: the next entry of their shard comes after them.

        Those that nobody keeps have none: nothing goes on there.
        """
        if journal == LIVE_JOURNAL:
            return iter([None] * len(batch))
        if self._is_by_partition:
            return self._of_partitions(batch)
        return self._of_shard(batch, journal, shard, epoch, next_entry, is_whole=is_whole)

    def _of_shard(
        self, batch: Batch, journal: str, shard: int, epoch: int, next_entry: int, *, is_whole: bool
    ) -> Iterator[str | None]:
        key = (journal, shard)
        self._shards.pop(key, None)
        text = self._text(ShardPlace(journal, shard, epoch, 0))
        runs = batch.runs()
        end = runs[-1].entry, runs[-1].row + runs[-1].count
        self._shards[key] = ShardPlace(
            journal, shard, epoch, *((next_entry, 0) if is_whole else end)
        )
        left = len(batch)
        for run in runs:
            for row in range(run.row + 1, run.row + run.count + 1):
                left -= 1
                if left or not is_whole:
                    yield self._id(text, f".{run.entry}.{row}")
                else:
                    yield self._id(text, f".{next_entry}.0")

    def _of_partitions(self, batch: Batch) -> Iterator[str | None]:
        for run in batch.runs():
            key = (run.topic, run.partition)
            self._partitions.pop(key, None)
            text = self._text(PartitionPlace(run.topic, run.partition, 0, run.epoch))
            end = run.base_offset + run.count
            self._partitions[key] = PartitionPlace(run.topic, run.partition, end, run.epoch)
            for offset in range(run.base_offset + 1, end + 1):
                yield self._id(text, f".{offset}")

    def missed(self, gap: GapState) -> str | None:
        """Move on behind what will not come. The id of that, if it is known where it was."""
        key = (gap.topic, gap.partition)
        place = self._partitions.get(key)
        if place is None or gap.next_offset <= place.offset:
            return None
        self._partitions[key] = PartitionPlace(*key, gap.next_offset, place.epoch)
        return self.current()

    def passed(self, journal: str, shard: int, epoch: int, next_entry: int) -> str | None:
        """Move on in a shard behind what will not come."""
        self._shards[journal, shard] = ShardPlace(journal, shard, epoch, next_entry)
        return self.current()

    # --- Text ---

    def _text(self, first: ShardPlace | PartitionPlace | None = None) -> str | None:
        """`places`, with this one before all others; None: they are too many."""
        known = self._partitions if self._is_by_partition else self._shards
        if self._is_too_long or len(known) > _PLACES_MAX:
            return None
        shards: list[ShardPlace] = []
        partitions: list[tuple[int, int, int, int]] = []
        if self._is_by_partition:
            places = list(self._partitions.values())
            if isinstance(first, PartitionPlace):
                places.insert(0, first)
            partitions = [
                (self._numbers[place.topic], place.partition, place.epoch, place.offset)
                for place in places
            ]
        else:
            shards = list(self._shards.values())
            if isinstance(first, ShardPlace):
                shards.insert(0, first)
        packed = _encode(_Places(1, self._checksum, self._is_last, shards, partitions))
        text = urlsafe_b64encode(packed).decode().rstrip("=")
        self._is_too_long = len(text) > ID_CHARS_MAX
        return None if self._is_too_long else text

    def _id(self, text: str | None, numbers: str = "") -> str | None:
        if text is None:
            return None
        whole = text + numbers
        if self._is_last and len(self._sent):
            whole += f"~{self._sent.token}.{len(self._sent)}"
        return whole if len(whole) <= ID_CHARS_MAX else None


def resumed(
    text: str, patterns: Sequence[str], lists: SentLists
) -> tuple[Start, Collection[bytes]]:
    """What to subscribe with to resume after an id, and which last values have come. FieldFault: it is none."""
    try:
        if len(text) > ID_CHARS_MAX:
            raise ValueError
        places, numbers, seen = _parts(text)
        decoded = _decode(places)
        came = _seen(seen, lists) if decoded.is_last else ()
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
    kind = "resume_last" if decoded.is_last else "resume"
    return Start(kind, partitions, 0, shards), came


def _parts(text: str) -> tuple[bytes, list[int], str]:
    text, _, seen = text.partition("~")
    places, *digits = text.split(".")
    return _from_base64(places), [_number(each) for each in digits], seen


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
    """The patterns; of one that matches a single name, as `a/[*]`, that name, which places have."""
    parsed = map(Pattern, patterns)
    return sorted({each.prefix if each.is_literal else each.text for each in parsed})


def _checksum(topics: Sequence[str]) -> int:
    return zlib.crc32("\0".join(topics).encode("utf-8", "surrogatepass"))


def _digest(run: Run, offset: int) -> bytes:
    named = f"{run.topic}\0{run.partition}\0{run.epoch}\0{offset}"
    return xxhash.xxh3_64_digest(named.encode())
