"""Test vectors of the native protocol's heads: at least one of each, complete, shortened and lengthened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from runnel.formats.batch import Batch
from runnel.formats.cluster_heads import (
    BalanceCluster,
    ClusterHead,
    ClusterReport,
    ClusterWishes,
    DrainNode,
    MoveShard,
    NodeReport,
    ShardName,
    ShardReport,
    ShardWish,
)
from runnel.formats.frames import pack_head
from runnel.formats.message import Message
from runnel.formats.metrics_report import ExposedMetric, encode_metrics
from runnel.formats.wire import (
    AsOf,
    Checkpoint,
    Closing,
    Credit,
    CursorListHead,
    CursorPlace,
    Cursors,
    CursorState,
    DeleteTopic,
    Deliver,
    DescribeTopic,
    Done,
    Ended,
    Error,
    Fetch,
    Fetched,
    FetchShard,
    GapNotice,
    GapState,
    Head,
    Hello,
    MakeCheckpoint,
    MetricsHead,
    MetricsReport,
    NodeList,
    Nodes,
    NodeState,
    Owner,
    PartitionPlace,
    PartitionState,
    Ping,
    Pong,
    Producer,
    Publish,
    Published,
    PurgeTopic,
    RemoveCursor,
    Route,
    RouteList,
    Routes,
    Send,
    SetCursor,
    ShardFetched,
    ShardList,
    ShardPlace,
    Shards,
    ShardsCame,
    ShardsFrom,
    ShardsLeft,
    ShardState,
    ShardTerm,
    Start,
    Statistics,
    StatisticsReport,
    Subscribe,
    Subscribed,
    Term,
    TopicList,
    Topics,
    TopicState,
    Unsubscribe,
    Welcome,
)
from runnel.formats.work_heads import (
    Ack,
    AckedHead,
    AckUpTo,
    Attempt,
    Consume,
    ConsumePart,
    ConsumerEnded,
    Consuming,
    DeadLettersHead,
    DeadList,
    DeleteSubscription,
    DeliveryPart,
    GiveBack,
    Held,
    HeldLease,
    Late,
    Lease,
    Leave,
    ListSubscriptions,
    MakeSubscription,
    MemberState,
    MoveSubscription,
    Moving,
    Nack,
    PartitionWork,
    PauseSubscription,
    Picked,
    Recall,
    Recalled,
    RemoveMember,
    Renew,
    SettleDead,
    SettledHead,
    SubscriptionListHead,
    SubscriptionState,
    Wants,
    Window,
    WindowShare,
    WorkHead,
    WorkOptions,
)

Vector = dict[str, Any]
Told = tuple[Head, bytes]  # a head and the tail of its frame

T0 = 1_700_000_000_000_000_000
UID = bytes.fromhex("0669F7EFB5A1CD34B5F99D1154FB6853345C9735")
EXACT_MAX = 2**53  # JSON readers round larger numbers
OPTIONS = WorkOptions(30_000, 3_600_000, 8, 1_000, 300_000, 2.0, 3_600_000)


# --- Meanings ---


def meaning(value: object) -> object:
    """A head, or a value in one, as JSON: fields by name, bytes in hex, large numbers as text."""
    match value:
        case msgspec.Struct():
            return {name: meaning(getattr(value, name)) for name in value.__struct_fields__}
        case bool() | str() | None:
            return value
        case float():
            return value
        case int():
            return value if abs(value) <= EXACT_MAX else str(value)
        case bytes():
            return value.hex()
        case Mapping():
            return {key: meaning(item) for key, item in value.items()}
        case Sequence():
            return [meaning(item) for item in value]
    raise AssertionError(f"{value!r} is nothing that heads have")


def _vector(
    name: str, about: str, sender: str, told: Sequence[Told], encoded: Sequence[bytes]
) -> Vector:
    return {
        "name": name,
        "about": about,
        "kind": "heads",
        "from": sender,
        "heads": [
            {
                "head": type(head).__struct_config__.tag,
                "fields": meaning(head),
                "encoded": data.hex(),
                "tail": tail.hex(),
            }
            for (head, tail), data in zip(told, encoded, strict=True)
        ],
        "hex": b"".join(
            pack_head(data, len(tail)) + tail for (_, tail), data in zip(told, encoded, strict=True)
        ).hex(),
    }


def _in_full(name: str, about: str, sender: str, told: Sequence[Told]) -> Vector:
    return _vector(name, about, sender, told, [msgspec.msgpack.encode(head) for head, _ in told])


# --- Examples of each head ---


def _block() -> bytes:
    message = Message("sensors/a", b"21.5", event_time_ns=T0, transmit_time_ns=T0 + 1_000)
    return Batch.from_messages([message]).pack()


def _by_clients() -> list[Told]:
    cursor = CursorPlace("sensors/a", 0, 102)
    wide = CursorPlace(journal="main", epoch=2, entry=32, patterns=["sensors/*"])
    heads: list[Head] = [
        Hello(1, 1, [], "example/1.0", None),
        Send(
            3,
            None,
            "sensors/a",
            b"21.5",
            b"a",
            {"unit": "C"},
            T0,
            T0 + 1_000,
            None,
            b"hall 7",
            UID,
        ),
        Send(4, "none", "größe", b"", None, None, -1, 0, 3, None, None),
        Subscribe(5, 1, ["sensors/*", "orders"], Start("last"), 2**20),
        Subscribe(6, 2, ["orders"], Start("offsets", [PartitionPlace("orders", 0, 17)]), 0),
        Subscribe(7, 3, ["*"], Start("time", time_ns=T0), 4096, "newest_per_topic"),
        Subscribe(
            8,
            4,
            ["sensors/*"],
            Start("resume", [PartitionPlace("sensors/a", 0, 102, 2)], 0, [ShardPlace("main", 0, 2, 32, 1)]),
            2**20,
            "disconnect",
        ),
        Subscribe(25, 5, ["*"], Start("resume_last", [], 0, [ShardPlace("main", 0, 2, 32)]), 2**20),
        Credit(1, 65_536),
        Credit(1, 0, 65_536),
        Unsubscribe(9, 1),
        Fetch(10, "sensors/a", 0, 101, None, 500, 2**20, 2_000),
        Fetch(11, "sensors/a", None, None, T0, 0, 2**20, 0),
        Routes(12, ["sensors/a", "not/yet"]),
        Producer(13, "billing"),
        Topics(14, "sensors/*", "sensors/a", 100),
        DescribeTopic(15, "sensors/a"),
        DeleteTopic(16, "sensors/a"),
        PurgeTopic(17, "sensors/a"),
        SetCursor(18, "archive", [cursor, wide]),
        RemoveCursor(19, "archive"),
        Cursors(20, None),
        Cursors(21, "archive"),
        Cursors(47, None, "archive", 1000),
        Statistics(22),
        Shards(23, ["sensors/*"], T0),
        FetchShard(24, "main", 0, 31, 40, ["sensors/*"], 2, 2**20),
        *_by_consumers(),
        MakeCheckpoint(27),
        Ping(2**53),
        Hello(1, 1, ["parts"], "example/1.0"),
        Nodes(48),
        MetricsHead(55),
        AsOf(2**62 + 1),
        ShardsFrom(49, 1, [ShardTerm("main", 3, 2), ShardTerm("main", 5, 1)], Start("latest")),
        ShardsFrom(50, 1, [ShardTerm("main", 3, 4)], Start("resume", [], 0, [ShardPlace("main", 3, 2, 32)])),
        ClusterHead(51, ShardName("main", 3), 1000),
        MoveShard(52, "main", 3, "node-2"),
        DrainNode(53, "node-1", False),
        BalanceCluster(54),
    ]  # fmt: skip
    told: list[Told] = [(head, b"") for head in heads]
    told.insert(1, (Publish(2, "stored"), _block()))
    return told


def _by_consumers() -> list[Head]:
    return [
        Consume(30, 1, "billing", ["orders/*"], "shared", 500, 2**20, "", Start("earliest"), OPTIONS),
        Consume(31, 2, "caches", [], "", 256, 8 * 2**20, "node-7", None, WorkOptions(lease_ms=5_000)),
        Window(1, 0, 0),
        ConsumePart(47, 3, "9f2c41d07a5be36804c1d2aa", "billing", ["orders/*"], "shared", 85, 2**18, "", None, OPTIONS),
        WindowShare(3, 20, 2**16, 1),
        GiveBack(3, [DeliveryPart(11, 18, 20)]),
        Ack(0, 1, [8], [DeliveryPart(7, 1, 18)]),
        Ack(32, 1, [7], []),
        Ack(0, 1, [], [], [Picked(7, 18, b"\x05\x80")]),
        AckUpTo(33, 1, "orders/eu", 0, 250),
        Nack(1, [DeliveryPart(7, 18, 19)], 5_000, "no such customer"),
        Nack(1, [DeliveryPart(2**63 - 1, 2**53, 2**63 - 1)], None, ""),
        Renew(1, [7, 8], None),
        Renew(1, [9], 600_000),
        Recalled(2, [DeliveryPart(7, 20, 21)]),
        Leave(34, 1),
        ListSubscriptions(35, None),
        ListSubscriptions(36, "billing"),
        ListSubscriptions(46, None, "billing", 1000),
        MakeSubscription(37, "billing", ["orders/*"], "key_shared", Start("time", time_ns=T0), OPTIONS),
        DeleteSubscription(38, "billing"),
        PauseSubscription(39, "billing", True),
        MoveSubscription(40, "billing", Start("offsets", [PartitionPlace("orders/eu", 0, 17)]), None),
        MoveSubscription(41, "caches", Start("latest"), "node-7"),
        RemoveMember(42, "caches", "node-7"),
        DeadLettersHead(43, "billing", 5, 100),
        SettleDead(44, "billing", True, [5, 6], False),
        SettleDead(45, "billing", False, [], True),
    ]  # fmt: skip


def _to_consumers(stored: bytes) -> list[Told]:
    leases = [
        Lease(7, "orders/eu", 0, 1, 251),
        Lease(8, "orders/us", 0, 12, 40, [Attempt(12, 1, T0), Attempt(13, 7, 0)]),
    ]
    held = [
        HeldLease(11, "orders/eu", 0, 6, 7, 1, b"\x05\x80", b"\x02"),
        HeldLease(12, "orders/us", 0, 6, 8, 12, b"\x01", b""),
    ]
    billing = SubscriptionState(
        "billing",
        "shared",
        ["orders/*"],
        True,
        T0,
        OPTIONS,
        [MemberState("", 4, 1_000, 250, 3, T0)],
        17,
        2,
        [PartitionWork("", "orders/eu", 0, 18, 1_018, 12, 250)],
    )
    caches = SubscriptionState(
        "caches", "multicast", ["prices"], False, T0, OPTIONS, [MemberState("node-7", 0, 9, 0, 0, T0, T0 + 5)], 0, 0
    )  # fmt: skip
    return [
        (Consuming(30, 1, "billing", "shared", ["orders/*"], OPTIONS, ""), b""),
        (Consuming(31, 2, "caches", "multicast", ["prices"], OPTIONS, "node-7"), b""),
        (WorkHead(1, leases), stored + stored),
        (Recall(2, [DeliveryPart(7, 20, 21), DeliveryPart(8, 3, 5)]), b""),
        (Late(1, [DeliveryPart(7, 0, 0), DeliveryPart(8, 12, 13)]), b""),
        (Wants(3, True), b""),
        (Moving(3, 6, [7, 8]), b""),
        (Held(3, held), b""),
        (ConsumerEnded(2, "member_replaced", "another took its place", False), b""),
        (AckedHead(32, []), b""),
        (AckedHead(33, [DeliveryPart(7, 1, 18)]), b""),
        (SubscriptionListHead(35, [billing, caches]), b""),
        (SubscriptionListHead(46, [caches], False), b""),
        (DeadList(43, 0), stored),
        (SettledHead(44, 2), b""),
    ]


def _by_brokers(stored: bytes) -> list[Told]:
    here = Owner("main", 0, 2)
    there = Owner("main", 0, 3, "node-2.example:7470")
    described = TopicState(
        "sensors/a", "disk", "main", 1, 104, 2, "sensors/*", True, "age 7d", [PartitionState(1, 105, here)]
    )  # fmt: skip
    wide = CursorPlace(journal="main", epoch=2, entry=32, patterns=["sensors/*"], lag=3)
    return [
        (
            Welcome(1, 1, [], "runnel", "node-1", "runnel/0.1.0", 2**24, 2**22, 2**20, 60_000),
            b"",
        ),
        (Published(2, [101, 7], 31, 2, T0 + 5_000, "stored", False, None), b""),
        (Published(3, [1], 9, 1, T0 + 5_000, "received", False, 4), b""),
        (Published(4, [], 12, 2, T0 + 5_000, "stored", True, None), b""),
        (Subscribed(5, 1, [PartitionPlace("orders", 0, 17, 2)], [ShardPlace("main", 0, 2, 32)]), b""),
        (Subscribed(5, 1, elsewhere=[Owner("main", 5, 3, "node-2.example:7470")]), b""),
        (ShardsCame(1, [ShardTerm("main", 0, 2), ShardTerm("main", 3, 1)]), b""),
        (ShardsLeft(1, [ShardTerm("main", 3, 1)]), b""),
        (
            NodeList(48, 7, [NodeState("node-1", ":7471", 1), NodeState("node-2", "node-2.example:7470", 3, True)]),
            b"",
        ),
        (NodeList(0, 8, [NodeState("node-1", ":7471", 1)]), b""),
        (
            ClusterReport(
                51,
                7,
                [NodeReport("node-1", ":7471", 3, True, False, 4711, 9, 1_250_000.5, 0.25)],
                [ShardReport("main", 4, 2, "node-1", "node-2", "node-1 drains", T0, 1_024.0)],
                False,
            ),
            b"",
        ),
        (ClusterWishes(54, [ShardWish("main", 4, "node-2", "node-1 has 2000 bytes/s, node-2 0")]), b""),
        (Deliver(1, "main", 0, 2, 32), stored + stored),
        (Deliver(1, "live", 0, 0, 0), b""),
        (GapNotice(1, GapState("overflow", 250, "ticks", 0, 1_000, 1_250)), b""),
        (GapNotice(1, GapState("damage", 0, text="a stretch of main/0 is damaged")), b""),
        (GapNotice(1, GapState("damage", 0, text="a stretch of main/3 is damaged"), "main", 3), b""),
        (Ended(1, "slow_reader", "the queue of 4 MiB is full", True), b""),
        (Fetched(10, 105, 1, 105, []), stored),
        (Fetched(11, 9, 8, 9, [GapState("retention", 7, "sensors/a", 0, 1, 8)]), b""),
        (ShardList(23, [ShardState("main", 0, 2, 1, 40, 31)]), b""),
        (ShardFetched(24, 2, 40, 1, 40, []), stored),
        (RouteList(12, [Route("sensors/a", "disk", [here]), Route("not/yet", "none", [there], False)]), b""),
        (Term(13, 4), b""),
        (TopicList(14, [described, TopicState("ticks", "none", "live", 4, 1_250, 1)], False), b""),
        (CursorListHead(20, [CursorState("archive", [CursorPlace("sensors/a", 0, 102, lag=3), wide], T0)]), b""),
        (CursorListHead(47, [], False), b""),
        (StatisticsReport(22), b'{"messages_in": 105}'),
        (MetricsReport(55), encode_metrics(_metrics())),
        *_to_consumers(stored),
        (Pong(23, T0), b""),
        (Done(9), b""),
        (Checkpoint(27, "/var/lib/runnel/checkpoint", "0123456789abcdef"), b""),
        (Error(24, "busy", "the shard main/0 has no room", True), b""),
        (
            Error(
                25,
                "offset_gone",
                "sensors/a[0] begins at offset 8: 7 messages from offset 1 on are gone",
                False,
                {"topic": "sensors/a", "partition": 0, "offset": 1, "first_offset": 8},
            ),
            b"",
        ),
        (Error(26, "moved", "main/0 has moved", True, {}, [Route("sensors/a", "disk", [there])]), b""),
        (Error(0, "malformed", "frame head: Invalid value 'pang'", False), b""),
        (Closing("shutting down", 10_000), b""),
    ]  # fmt: skip


def _metrics() -> list[ExposedMetric]:
    """One of each kind."""
    buckets = [("0.001", 3.0), ("+Inf", 4.0)]
    return [
        ExposedMetric(
            "runnel_messages_in", "counter", "Messages accepted from publishers.", (), [((), 105.0)]
        ),
        ExposedMetric(
            "runnel_journal_segments", "gauge", "Segment files.", ("journal",), [(("main",), 2.0)]
        ),
        ExposedMetric(
            "runnel_publish_time_seconds", "histogram", "How long.", buckets=buckets, sum=0.25
        ),
    ]


def _short() -> list[tuple[Head, list[object]]]:
    return [
        (Hello(1, 1), ["hello", 1, 1]),
        (Publish(2), ["publish", 2]),
        (Send(3, None, "t", b"x"), ["send", 3, None, "t", b"x"]),
        (Send(4, None, "t", b"x", b"k"), ["send", 4, None, "t", b"x", b"k"]),
        (
            Subscribe(5, 1, ["*"], Start("latest"), 2**20),
            ["subscribe", 5, 1, ["*"], ["latest"], 2**20],
        ),
        (Fetch(6, "t"), ["fetch", 6, "t"]),
        (Fetch(7, "t", None, 5), ["fetch", 7, "t", None, 5]),
        (Topics(8), ["topics", 8]),
        (FetchShard(8, "main", 0, 1), ["fetch_shard", 8, "main", 0, 1]),
        (SetCursor(9, "c", [CursorPlace("t", 0, 5)]), ["cursor_set", 9, "c", [["t", 0, 5]]]),
        (Cursors(10), ["cursors", 10]),
        (Consume(11, 1, "s"), ["consume", 11, 1, "s"]),
        (Consume(12, 1, "s", ["*"], "shared"), ["consume", 12, 1, "s", ["*"], "shared"]),
        (Ack(13, 1), ["ack", 13, 1]),
        (Ack(0, 1, [7]), ["ack", 0, 1, [7]]),
        (Nack(1, [DeliveryPart(7, 18, 19)]), ["nack", 1, [[7, 18, 19]]]),
        (Renew(1, [7]), ["renew", 1, [7]]),
        (DeadLettersHead(14, "s"), ["dead", 14, "s"]),
    ]


def _longer() -> list[tuple[Head, list[object]]]:
    owner: list[object] = ["main", 0, 2, "", "of a later version"]
    return [
        (Pong(1, T0), ["pong", 1, T0, {"later": [1, 2.5]}]),
        (Term(2, 4), ["term", 2, 4, None, b"\xff"]),
        (
            RouteList(3, [Route("t", "disk", [Owner("main", 0, 2)])]),
            ["route_list", 3, [["t", "disk", [owner], True, 7]], "later"],
        ),
        (Done(4), ["done", 4, [[[]]]]),
        (AckedHead(5, [DeliveryPart(7, 1, 2)]), ["acked", 5, [[7, 1, 2, "later"]], 0]),
    ]


def vectors(stored: bytes) -> list[Vector]:
    """`stored` is a block as a broker sends it."""
    short, longer = _short(), _longer()
    return [
        _in_full(
            "heads-client",
            "What a client says, every field written. The tail of `publish` is a block.",
            "client",
            _by_clients(),
        ),
        _in_full(
            "heads-broker",
            "What a broker says, every field written.",
            "broker",
            _by_brokers(stored),
        ),
        _vector(
            "heads-short",
            "Fields at the end that have a default may be left out: they mean their defaults.",
            "client",
            [(head, b"") for head, _ in short],
            [msgspec.msgpack.encode(elements) for _, elements in short],
        ),
        _vector(
            "heads-longer",
            "Elements that a later version may add, in a head and in its values: pass over them.",
            "broker",
            [(head, b"") for head, _ in longer],
            [msgspec.msgpack.encode(elements) for _, elements in longer],
        ),
    ]
