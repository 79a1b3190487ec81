"""The heads of the native protocol's frames: requests, answers and notices, as small msgpack arrays.

A head is an array whose first element names it: `["ping", 7]`. Requests carry an id that the client chose, and the
answer carries it back; answers may come in another order than requests. Fields at the end of an array that have a
default may be left out, and a reader ignores elements that it does not know, so that both sides can add fields.
Batches follow the head as blocks (`block`), unchanged.

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
from runnel.formats.cluster_heads import ClusterAnswer, ClusterRequest
from runnel.formats.frames import Frame
from runnel.formats.heads import Head as Head
from runnel.formats.heads import Id, Natural, Time
from runnel.formats.heads import PartitionPlace as PartitionPlace
from runnel.formats.heads import ShardPlace as ShardPlace
from runnel.formats.heads import Start as Start
from runnel.formats.work_heads import WorkAnswer, WorkRequest

VERSION: Final = 1
DEFAULT_PORT: Final = 7470

# Features. A client says `parts` in its hello, a broker that is one of several says `nodes` in its welcome.
PARTS: Final = "parts"  # this client follows routes to all nodes, and merges what they deliver
NODES: Final = (
    "nodes"  # other nodes serve shards too; the broker knows the features that it names beside it
)
PART_ONLY: Final = (
    "part_only"  # this client is another node, which merges: it asks for this node's own shards
)


# --- Values inside heads ---


class Owner(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The owner of a partition: the shard, the owner's epoch, and the owner's address ("": the node that answers)."""

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


class NodeState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A living node of the broker, and the address of its native listener."""

    name: str
    address: str  # without a host: the host that the client has reached
    incarnation: int = 0
    is_draining: bool = False


class ShardTerm(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard in one term of its ownership."""

    journal: str
    shard: Natural
    epoch: Natural


class CursorPlace(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A position of a named cursor: in a topic-partition, or in a shard for some patterns."""

    topic: str | None = None
    partition: Natural = 0
    offset: Natural = 0
    journal: str | None = None
    shard: Natural = 0
    epoch: Natural = 0
    entry: Natural = 0
    row: Natural = 0
    patterns: Sequence[str] = ()
    lag: int = 0  # matching messages, filled in by the broker; for a shard an upper bound


class CursorState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A named cursor: all of its positions, and when it was last set."""

    name: str
    places: Sequence[CursorPlace]
    updated_ns: int


class PartitionState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The first and the next offset of a partition, and its owner."""

    first_offset: int
    next_offset: int
    owner: Owner


class ShardState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard and its entries. `time_entry`: the first one at the requested time."""

    journal: str
    shard: int
    epoch: int
    first_entry: int
    next_entry: int
    time_entry: int = 0
    address: str = ""


class TopicState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A topic as `topics` lists it. `partitions` is empty unless the topic was requested by its name."""

    name: str
    keep: str
    journal: str
    partition_count: int
    messages: int  # that got an offset so far; some may be removed
    subscribers: int
    rule: str | None = None
    last_value: bool = False
    retain: str = ""
    partitions: Sequence[PartitionState] = ()


class GapState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages that a reader will not get, and why: overflow, retention, damage or restart.

    `missed` is 0 if their number is not known. `topic` is empty if a range of a whole shard is missing.
    """

    reason: str
    missed: int
    topic: str = ""
    partition: int = 0
    first_offset: int = 0  # the first missing one
    next_offset: int = 0  # the first one behind the gap
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
    """Begin live reading. `subscription` is the client's number for it; `credit_bytes` may be in flight."""

    id: Id
    subscription: Id
    patterns: Sequence[str]
    start: Start
    credit_bytes: Natural
    overflow: str = "drop_oldest"  # for ephemeral topics: or newest_per_topic, disconnect


class Credit(Head, tag="credit", frozen=True, gc=False):
    """Allow the broker to send this many more bytes of blocks, and so many less. Not answered."""

    subscription: Id
    credit_bytes: Natural
    less_bytes: Natural = 0


class Unsubscribe(Head, tag="unsubscribe", frozen=True, gc=False):
    """End a subscription. Nothing is delivered after `done`."""

    id: Id
    subscription: Id


class ShardsFrom(Head, tag="shards_from", frozen=True, gc=False):
    """Begin to read these shards for a subscription in parts. `start` holds for these shards only.

    Answered by `subscribed`, which leaves out shards that the node no longer serves in the named term.
    """

    id: Id
    subscription: Id
    shards: Sequence[ShardTerm]
    start: Start


class Nodes(Head, tag="nodes", frozen=True, gc=False):
    """List the living nodes."""

    id: Id


class Fetch(Head, tag="fetch", frozen=True, gc=False):
    """Fetch messages from an offset, or without one from a time. Waits for the first up to `wait_ms`."""

    id: Id
    topic: str
    partition: Natural | None = None
    offset: Natural | None = None
    time_ns: Time | None = None
    messages_max: Natural = 0  # 0: as many as fit
    bytes_max: Natural = 2**20
    wait_ms: Natural = 0


class Shards(Head, tag="shards", frozen=True, gc=False):
    """List the shards with matching topics, and their entries."""

    id: Id
    patterns: Sequence[str]
    time_ns: Time | None = None


class FetchShard(Head, tag="fetch_shard", frozen=True, gc=False):
    """Fetch matching messages of a shard in stored order, from an entry on.

    The read ends before `end_entry` (0: at the end of the shard). With an `epoch`, entries of another epoch count as
    gone; 0: any epoch.
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
    """List the routes of these topics. Makes none of the topics."""

    id: Id
    topics: Sequence[str]


class Producer(Head, tag="producer", frozen=True, gc=False):
    """Begin a new term of a named publisher. It fences earlier publishers of that name."""

    id: Id
    name: str


class Topics(Head, tag="topics", frozen=True, gc=False):
    """List topics that match a pattern, by name, beginning after `after`."""

    id: Id
    pattern: str = "*"
    after: str = ""
    limit: Natural = 1000


class DescribeTopic(Head, tag="topic", frozen=True, gc=False):
    """Describe a topic with its partitions."""

    id: Id
    name: str


class DeleteTopic(Head, tag="topic_delete", frozen=True, gc=False):
    """Delete a topic with its messages."""

    id: Id
    name: str


class PurgeTopic(Head, tag="topic_purge", frozen=True, gc=False):
    """Remove all messages of a topic."""

    id: Id
    name: str


class SetCursor(Head, tag="cursor_set", frozen=True, gc=False):
    """Make a named cursor, or move it."""

    id: Id
    name: str
    places: Sequence[CursorPlace]


class RemoveCursor(Head, tag="cursor_remove", frozen=True, gc=False):
    """Remove a named cursor."""

    id: Id
    name: str


class Cursors(Head, tag="cursors", frozen=True, gc=False):
    """List named cursors by name, beginning after `after`, or the one of this name.

    A limit of 0 means that the client does not page: it gets all of them, or an error.
    """

    id: Id
    name: str | None = None
    after: str = ""
    limit: Natural = 0


class Statistics(Head, tag="statistics", frozen=True, gc=False):
    """Request the broker's statistics."""

    id: Id


class MetricsHead(Head, tag="metrics", frozen=True, gc=False):
    """Request all metrics of the node that answers."""

    id: Id


class MakeCheckpoint(Head, tag="checkpoint", frozen=True, gc=False):
    """Make a checkpoint: every file as of one moment, for a copy. It is removed when the connection ends."""

    id: Id


class AsOf(Head, tag="as_of", frozen=True, gc=False):
    """Among nodes: the next request holds only for a node that serves just the shards that its asker believes.

    `stamp` is a hash over these shards and their epochs. Otherwise that request is `moved`. Not answered.
    """

    stamp: Natural


class Ping(Head, tag="ping", frozen=True, gc=False):
    """Request a `pong`."""

    id: Id


# --- Answers and notices ---


class Welcome(Head, tag="welcome", frozen=True, gc=False):
    """The answer to `hello`: the broker's version, name and limits."""

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
    """`base_offsets`: one per run. `level`: the one reached. `receivers`: how many got it, on ephemeral topics."""

    id: Id
    base_offsets: Sequence[int]
    entry: int
    epoch: int
    receive_time_ns: int
    level: str
    is_repeated: bool = False
    receivers: int | None = None


class Subscribed(Head, tag="subscribed", frozen=True, gc=False):
    """Where a subscription begins, by partition or by shard. A reconnecting client sends it back as `resume`."""

    id: Id
    subscription: Id
    partitions: Sequence[PartitionPlace] = ()
    shards: Sequence[ShardPlace] = ()
    elsewhere: Sequence[
        Owner
    ] = ()  # in parts: shards of its patterns that this node does not serve


class ShardsCame(Head, tag="shards_came", frozen=True, gc=False):
    """The node serves these shards, and delivers nothing of them to a subscription in parts before `shards_from`."""

    subscription: Id
    shards: Sequence[ShardTerm]


class ShardsLeft(Head, tag="shards_left", frozen=True, gc=False):
    """The node no longer serves these shards. A subscription in parts continues without them."""

    subscription: Id
    shards: Sequence[ShardTerm]


class NodeList(Head, tag="node_list", frozen=True, gc=False):
    """The answer to `nodes`; with id 0 a notice that nodes have changed. A later state has a higher version."""

    id: Id
    version: int
    nodes: Sequence[NodeState]


class Deliver(Head, tag="deliver", frozen=True, gc=False):
    """Blocks of one shard for a subscription, and the entry that comes next (0: history out of order).

    Without blocks: all last values have been sent.
    """

    subscription: Id
    journal: str
    shard: int
    epoch: int
    next_entry: int


class GapNotice(Head, tag="gap", frozen=True, gc=False):
    """A subscription misses messages. The notice comes before the messages behind the gap.

    With a journal, a gap of a subscription in parts: it belongs to the next `deliver` of that shard.
    """

    subscription: Id
    gap: GapState
    journal: str = ""
    shard: Natural = 0


class Ended(Head, tag="ended", frozen=True, gc=False):
    """The broker has ended a subscription."""

    subscription: Id
    code: str
    text: str
    retriable: bool
    routes: Sequence[Route] = ()  # of `moved`: where its topics are now


class Fetched(Head, tag="fetched", frozen=True, gc=False):
    """Blocks behind the head; the next fetch begins at `next_offset`."""

    id: Id
    next_offset: int
    first_offset: int  # of the partition, now
    end_offset: int  # the partition's next message, now
    gaps: Sequence[GapState] = ()


class ShardList(Head, tag="shard_list", frozen=True, gc=False):
    """The answer to `shards`."""

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
    """The answer to `routes`."""

    id: Id
    routes: Sequence[Route]


class Term(Head, tag="term", frozen=True, gc=False):
    """The answer to `producer`."""

    id: Id
    term: int


class TopicList(Head, tag="topic_list", frozen=True, gc=False):
    """The answer to `topics` and `topic`."""

    id: Id
    topics: Sequence[TopicState]
    is_complete: bool


class CursorListHead(Head, tag="cursor_list", frozen=True, gc=False):
    """The answer to `cursors`."""

    id: Id
    cursors: Sequence[CursorState]
    is_complete: bool = True


class StatisticsReport(Head, tag="statistics_report", frozen=True, gc=False):
    """JSON in the tail: the same document as on `!system/metrics/broker`."""

    id: Id


class MetricsReport(Head, tag="metrics_report", frozen=True, gc=False):
    """All metrics of the node that answers, as an array of `ExposedMetric` in the tail (`metrics_report`)."""

    id: Id


class Pong(Head, tag="pong", frozen=True, gc=False):
    """The answer to `ping`, with the broker's time."""

    id: Id
    time_ns: int


class Done(Head, tag="done", frozen=True, gc=False):
    """The request succeeded, and has no other answer."""

    id: Id


class Checkpoint(Head, tag="checkpointed", frozen=True, gc=False):
    """A checkpoint: its path on the broker's machine, and its id in the file that describes it."""

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
    """The broker is stopping. It finishes accepted requests and takes no new ones. Connect again later."""

    text: str
    within_ms: int


Request: TypeAlias = (
    Hello
    | Publish
    | Send
    | Subscribe
    | Credit
    | Unsubscribe
    | ShardsFrom
    | Nodes
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
    | MetricsHead
    | MakeCheckpoint
    | AsOf
    | Ping
    | ClusterRequest
    | WorkRequest
)
Answer: TypeAlias = (
    Welcome
    | Published
    | Subscribed
    | ShardsCame
    | ShardsLeft
    | NodeList
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
    | MetricsReport
    | Pong
    | Done
    | Checkpoint
    | Error
    | Closing
    | ClusterAnswer
    | WorkAnswer
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(head: Head, tail_bytes: int = 0) -> bytes:
    """A frame up to its tail, which the caller sends."""
    try:
        return frames.pack_head(_encoder.encode(head), tail_bytes)
    except UnicodeEncodeError as error:
        raise MalformedError(f"{type(head).__name__} frame", f"not valid UTF-8: {error}") from None


def check_request(head: Head) -> None:
    """Raise MalformedError if a broker could not decode this, because a value is not of its field's type."""
    try:
        _requests.decode(_encoder.encode(head))
    except (TypeError, OverflowError, UnicodeEncodeError, msgspec.DecodeError) as error:
        raise MalformedError(f"{type(head).__name__} request", str(error)) from None


def decode_request(frame: Frame) -> Request:
    """Decode a client's request. MalformedError says what is wrong with it."""
    try:
        return _requests.decode(frame.head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError("frame head", str(error)) from None


def decode_answer(frame: Frame) -> Answer:
    """Decode a broker's answer or notice."""
    try:
        return _answers.decode(frame.head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError("frame head", str(error)) from None
