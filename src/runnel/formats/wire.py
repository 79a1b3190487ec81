"""The heads of the native protocol's frames: what client and broker say to each other, as small msgpack arrays.

A head is an array whose first element names it: `["ping", 7]`. Requests carry an id that the client chose, and the
answer carries it back; answers may come in another order than requests. Fields at the end of an array that have a
default may be left out, and a reader passes over elements that it does not know, so that both sides can grow.
Batches travel behind the head as blocks (`block`), untouched.

    client                                              broker
    ["hello", 1, 1, [], "runnel-python/0.1"]       ──▶
                                                   ◀──  ["welcome", 1, 1, [], "", "node-1", …]
    ["publish", 2, "stored"] + block               ──▶
                                                   ◀──  ["published", 2, [17], 5, 1, 1700…, "stored"]
    ["subscribe", 3, 1, ["a/*"], ["last"], 2**20]  ──▶
                                                   ◀──  ["subscribed", 3, 1, …]
                                                   ◀──  ["deliver", 1, "main", 0, 1, 6] + blocks
    ["credit", 1, 4096]                            ──▶

Everything here is data: what a field means for the broker is decided in `broker`, for a caller in `client`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from runnel.errors import MalformedError
from runnel.formats import frames
from runnel.formats.frames import Frame
from runnel.formats.heads import Head as Head
from runnel.formats.heads import Id, Natural, Time
from runnel.formats.heads import PartitionPlace as PartitionPlace
from runnel.formats.heads import ShardPlace as ShardPlace
from runnel.formats.heads import Start as Start
from runnel.formats.work_heads import WorkAnswer, WorkRequest

VERSION: Final = 1
DEFAULT_PORT: Final = 7470


# --- Values inside heads ---


class Owner(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Who has a partition: its shard, the owner's term, and the owner's address ("": the node asked)."""

    journal: str
    shard: int
    epoch: int
    address: str = ""


class Route(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a topic's messages go, by partition. A topic that does not exist yet has the route it would get."""

    topic: str
    keep: str
    owners: Sequence[Owner]
    exists: bool = True


class CursorPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a named cursor stands: in a topic-partition, or in a shard for some patterns."""

    topic: str | None = None
    partition: Natural = 0
    offset: Natural = 0
    journal: str | None = None
    shard: Natural = 0
    epoch: Natural = 0
    entry: Natural = 0
    row: Natural = 0
    patterns: Sequence[str] = ()
    lag: int = 0  # filled in by the broker: messages that match, of a shard at most so many


class CursorState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A named cursor: all of its places, and when it was set last."""

    name: str
    places: Sequence[CursorPlace]
    updated_ns: int


class PartitionState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The first offset that a partition still has, the next one that it will give, and who has it."""

    first_offset: int
    next_offset: int
    owner: Owner


class ShardState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard and the entries it has. `time_entry`: the first at the time that was asked about."""

    journal: str
    shard: int
    epoch: int
    first_entry: int
    next_entry: int
    time_entry: int = 0
    address: str = ""


class TopicState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A topic as `topics` lists it. `partitions` is empty unless it was described by its name."""

    name: str
    keep: str
    journal: str
    partition_count: int
    messages: int  # that have been given a number so far; not all of them need be there
    subscribers: int
    rule: str | None = None
    last_value: bool = False
    retain: str = ""
    partitions: Sequence[PartitionState] = ()


class GapState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages that a reader will not get, and why: overflow, retention, damage or restart.

    `missed` is 0 where nobody can know how many. `topic` is empty where a whole shard's stretch is gone.
    """

    reason: str
    missed: int
    topic: str = ""
    partition: int = 0
    first_offset: int = 0  # the first that is missing
    next_offset: int = 0  # the first that is there again
    text: str = ""


# --- Requests ---


class Hello(Head, tag="hello", frozen=True, gc=False):
    """The first frame of a connection."""

    id: Id
    version: int
    features: Sequence[str] = ()
    client: str = ""
    token: str | None = None


class Publish(Head, tag="publish", frozen=True, gc=False):
    """One batch, a block behind the head. Without a level: stored on disk topics, received on others."""

    id: Id
    level: str | None = None


class Send(Head, tag="send", frozen=True, gc=False):
    """One message without columns; the broker gathers these into batches. Without a partition: by its key."""

    id: Id
    level: str | None
    topic: str
    payload: bytes
    key: bytes | None = None
    tags: dict[str, str] | None = None
    event_time_ns: Time = 0
    transmit_time_ns: Time = 0
    partition: Natural | None = None
    partition_key: bytes | None = None
    uid: bytes | None = None


class Subscribe(Head, tag="subscribe", frozen=True, gc=False):
    """Live reading. `subscription` is the client's number for it; `credit_bytes` what may be under way."""

    id: Id
    subscription: Id
    patterns: Sequence[str]
    start: Start
    credit_bytes: Natural
    overflow: str = "drop_oldest"  # for topics that are not kept: or newest_per_topic, disconnect


class Credit(Head, tag="credit", frozen=True, gc=False):
    """So many more bytes of blocks may be sent. Not answered."""

    subscription: Id
    credit_bytes: Natural


class Unsubscribe(Head, tag="unsubscribe", frozen=True, gc=False):
    """After its `done` no more is delivered."""

    id: Id
    subscription: Id


class Fetch(Head, tag="fetch", frozen=True, gc=False):
    """Messages from an offset, or from a time where no offset is given. Waits for the first up to `wait_ms`."""

    id: Id
    topic: str
    partition: Natural | None = None
    offset: Natural | None = None
    time_ns: Time | None = None
    messages_max: Natural = 0  # 0: as many as fit
    bytes_max: Natural = 2**20
    wait_ms: Natural = 0


class Shards(Head, tag="shards", frozen=True, gc=False):
    """In which shards do topics lie that match, and which entries have they?"""

    id: Id
    patterns: Sequence[str]
    time_ns: Time | None = None


class FetchShard(Head, tag="fetch_shard", frozen=True, gc=False):
    """Everything of a shard that matches, in the order in which it was stored, from an entry on.

    Up to `end_entry`, which is not read any more (0: as far as there is). With an `epoch`, entries of another one
    are gone; 0: whichever there is.
    """

    id: Id
    journal: str
    shard: Natural
    entry: Natural
    end_entry: Natural = 0
    patterns: Sequence[str] = ("*",)
    epoch: Natural = 0
    bytes_max: Natural = 2**20


class Routes(Head, tag="routes", frozen=True, gc=False):
    """Where do the messages of these topics go? Makes none of them."""

    id: Id
    topics: Sequence[str]


class Producer(Head, tag="producer", frozen=True, gc=False):
    """A new term for a named publisher: it fences whoever had the name before."""

    id: Id
    name: str


class Topics(Head, tag="topics", frozen=True, gc=False):
    """Topics that match a pattern, in order of their names, from behind `after` on."""

    id: Id
    pattern: str = "*"
    after: str = ""
    limit: Natural = 1000


class DescribeTopic(Head, tag="topic", frozen=True, gc=False):
    id: Id
    name: str


class DeleteTopic(Head, tag="topic_delete", frozen=True, gc=False):
    id: Id
    name: str


class PurgeTopic(Head, tag="topic_purge", frozen=True, gc=False):
    id: Id
    name: str


class SetCursor(Head, tag="cursor_set", frozen=True, gc=False):
    id: Id
    name: str
    places: Sequence[CursorPlace]


class RemoveCursor(Head, tag="cursor_remove", frozen=True, gc=False):
    id: Id
    name: str


class Cursors(Head, tag="cursors", frozen=True, gc=False):
    """Named cursors in order of their names, from behind `after` on, or the one of this name.

    A limit of 0 is a client that does not page: it gets all of them, or an error.
    """

    id: Id
    name: str | None = None
    after: str = ""
    limit: Natural = 0


class Statistics(Head, tag="statistics", frozen=True, gc=False):
    id: Id


class MakeCheckpoint(Head, tag="checkpoint", frozen=True, gc=False):
    """Every file as of one moment, for a copy. It is removed when the connection ends."""

    id: Id


class Ping(Head, tag="ping", frozen=True, gc=False):
    id: Id


# --- Answers, and what the broker says by itself ---


class Welcome(Head, tag="welcome", frozen=True, gc=False):
    """What the broker says of itself at the beginning of a connection."""

    id: Id
    version: int
    features: Sequence[str]
    cluster: str
    node: str
    server: str
    frame_bytes_max: int
    batch_bytes_max: int
    message_bytes_max: int
    idle_timeout_ms: int  # send something at least this often


class Published(Head, tag="published", frozen=True, gc=False):
    """`base_offsets`: of each run. `level`: what was reached. `receivers`: who got it, of topics not kept."""

    id: Id
    base_offsets: Sequence[int]
    entry: int
    epoch: int
    receive_time_ns: int
    level: str
    is_repeated: bool = False
    receivers: int | None = None


class Subscribed(Head, tag="subscribed", frozen=True, gc=False):
    """Where it begins, by partition or by shard: what a reconnecting client gives back as `resume`."""

    id: Id
    subscription: Id
    partitions: Sequence[PartitionPlace] = ()
    shards: Sequence[ShardPlace] = ()


class Deliver(Head, tag="deliver", frozen=True, gc=False):
    """Blocks of one shard for a subscription, and the entry that it goes on with (0: history out of order).

    Without blocks: all last values have been sent.
    """

    subscription: Id
    journal: str
    shard: int
    epoch: int
    next_entry: int


class GapNotice(Head, tag="gap", frozen=True, gc=False):
    """A subscription misses something. It comes before what is delivered after the gap."""

    subscription: Id
    gap: GapState


class Ended(Head, tag="ended", frozen=True, gc=False):
    """The broker has ended a subscription."""

    subscription: Id
    code: str
    text: str
    retriable: bool


class Fetched(Head, tag="fetched", frozen=True, gc=False):
    """Blocks behind the head; the next fetch begins at `next_offset`."""

    id: Id
    next_offset: int
    first_offset: int  # of the partition, now
    end_offset: int  # the partition's next message, now
    gaps: Sequence[GapState] = ()


class ShardList(Head, tag="shard_list", frozen=True, gc=False):
    id: Id
    shards: Sequence[ShardState]


class ShardFetched(Head, tag="shard_fetched", frozen=True, gc=False):
    """Blocks behind the head, perhaps none; the next fetch begins at `next_entry`."""

    id: Id
    epoch: int
    next_entry: int
    first_entry: int  # of the shard, now
    end_entry: int  # the shard's next entry, now
    gaps: Sequence[GapState] = ()


class RouteList(Head, tag="route_list", frozen=True, gc=False):
    id: Id
    routes: Sequence[Route]


class Term(Head, tag="term", frozen=True, gc=False):
    id: Id
    term: int


class TopicList(Head, tag="topic_list", frozen=True, gc=False):
    id: Id
    topics: Sequence[TopicState]
    is_complete: bool


class CursorListHead(Head, tag="cursor_list", frozen=True, gc=False):
    id: Id
    cursors: Sequence[CursorState]
    is_complete: bool = True


class StatisticsReport(Head, tag="statistics_report", frozen=True, gc=False):
    """JSON in the tail: the same document as on `!system/metrics/broker`."""

    id: Id


class Pong(Head, tag="pong", frozen=True, gc=False):
    id: Id
    time_ns: int


class Done(Head, tag="done", frozen=True, gc=False):
    id: Id


class Checkpoint(Head, tag="checkpointed", frozen=True, gc=False):
    """Where it lies on the broker's machine, and what the file in it calls it."""

    id: Id
    path: str
    checkpoint: str


class Error(Head, tag="error", frozen=True, gc=False):
    """A request failed (id 0: the connection, which is then closed). `details` by code, as in docs/protocol.md."""

    id: Id
    code: str
    text: str
    retriable: bool
    details: dict[str, str | int] = {}  # noqa: RUF012 - msgspec copies it
    routes: Sequence[Route] = ()  # of `moved`: where it is now


class Closing(Head, tag="closing", frozen=True, gc=False):
    """The broker is about to go: what was accepted is finished, nothing new is. Connect again later."""

    text: str
    within_ms: int


Request: TypeAlias = (
    Hello
    | Publish
    | Send
    | Subscribe
    | Credit
    | Unsubscribe
    | Fetch
    | Shards
    | FetchShard
    | Routes
    | Producer
    | Topics
    | DescribeTopic
    | DeleteTopic
    | PurgeTopic
    | SetCursor
    | RemoveCursor
    | Cursors
    | Statistics
    | MakeCheckpoint
    | Ping
    | WorkRequest
)
Answer: TypeAlias = (
    Welcome
    | Published
    | Subscribed
    | Deliver
    | GapNotice
    | Ended
    | Fetched
    | ShardList
    | ShardFetched
    | RouteList
    | Term
    | TopicList
    | CursorListHead
    | StatisticsReport
    | Pong
    | Done
    | Checkpoint
    | Error
    | Closing
    | WorkAnswer
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(head: Head, tail_bytes: int = 0) -> bytes:
    """A frame up to its tail, which follows by reference."""
    try:
        return frames.pack_head(_encoder.encode(head), tail_bytes)
    except UnicodeEncodeError as error:
        raise MalformedError(f"{type(head).__name__} frame", f"not valid UTF-8: {error}") from None


def check_request(head: Head) -> None:
    """MalformedError: a broker would not understand this, as a value is not of its field's type."""
    try:
        _requests.decode(_encoder.encode(head))
    except (TypeError, OverflowError, UnicodeEncodeError, msgspec.DecodeError) as error:
        raise MalformedError(f"{type(head).__name__} request", str(error)) from None


def decode_request(frame: Frame) -> Request:
    """What a client said. MalformedError says what cannot be understood."""
    try:
        return _requests.decode(frame.head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError("frame head", str(error)) from None


def decode_answer(frame: Frame) -> Answer:
    """What a broker said."""
    try:
        return _answers.decode(frame.head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError("frame head", str(error)) from None
