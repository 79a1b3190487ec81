"""The heads of acknowledged work: consuming, acknowledging, subscriptions, dead letters.

    client                                                    broker
    ["consume", 4, 1, "billing", ["orders/*"], "shared"]  ──▶
                                                          ◀──  ["consuming", 4, 1, "billing", "shared", …]
                                                          ◀──  ["work", 1, [[7, "orders/eu", 0, 1, 250]]] + blocks
    ["ack", 0, 1, [7]]                                    ──▶
    ["nack", 1, [[7, 18, 19]], 5000, "no such customer"]  ──▶
    ["renew", 1, [7]]                                     ──▶
                                                          ◀──  ["recall", 1, [[7, 20, 21]]]
    ["recalled", 1, [[7, 20, 21]]]                        ──▶

A delivery is a stretch of one partition, leased to one consumer; its id is the broker's. Parts of it are named by
offsets: `[7, 18, 20]` are the messages 18 and 19 of delivery 7; or, where they lie scattered, by bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from runnel.formats.heads import Head, Id, Natural, Start


class DeliveryPart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages of a delivery, by their offsets: those from `begin` on, and not `end`."""

    delivery: Natural
    begin: Natural
    end: Natural


PICKED_BYTES_MAX: Final = 512
"""Of `Picked.bits`: no delivery spans more than 4,096 messages."""


class Picked(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Scattered messages of a delivery, a bit each: bit i of `bits`, lowest byte first, is the offset `begin` + i."""

    delivery: Natural
    begin: Natural
    bits: bytes


class Attempt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A message that was delivered before: how often it failed, and when it was first delivered."""

    offset: int
    failures: int
    first_delivery_ns: int


class Lease(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One delivery of a `work` frame; its block follows the head, in the same order.

    The block may have fewer messages than `begin` to `end` span: others were acknowledged before.
    """

    delivery: Natural
    topic: str
    partition: int
    begin: int
    end: int
    attempts: Sequence[Attempt] = ()


class WorkOptions(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a subscription treats what it delivers. None, or no options: the broker's defaults."""

    lease_ms: Natural | None = None
    processing_ms_max: Natural | None = None
    deliveries_max: Natural | None = None  # 0: no limit, nothing becomes a dead letter
    retry_delay_ms: Natural | None = None
    retry_delay_ms_max: Natural | None = None
    backoff: float | None = None  # each further delay is so many times the one before
    absent_ms_max: Natural | None = None  # of a member of a multicast


class MemberState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A member of a multicast, or the consumers of another mode taken together (without a name)."""

    name: str
    consumers: int
    backlog: int  # messages not acknowledged, those in flight included
    in_flight: int
    delayed: int  # that wait for their next attempt
    oldest_ns: int  # when the oldest message not acknowledged was received; 0: there is none
    absent_ns: int = 0  # since when nobody is there; 0: somebody is


class PartitionWork(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where a member stands in a partition: everything before `floor` is acknowledged."""

    member: str
    topic: str
    partition: int
    floor: int
    next_offset: int  # of the partition
    acked_beyond: int  # messages at `floor` or behind it that are acknowledged
    in_flight: int


class SubscriptionState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A subscription as `subscriptions` lists it. `partitions` is empty unless it was asked for by its name."""

    name: str
    mode: str
    patterns: Sequence[str]
    is_paused: bool
    made_ns: int
    options: WorkOptions
    members: Sequence[MemberState]
    redelivered: int  # since the broker started
    dead: int  # dead letters that nobody has sent back or dropped
    partitions: Sequence[PartitionWork] = ()


# --- Requests ---


class Consume(Head, tag="consume", frozen=True, gc=False):
    """Take part in a subscription, which is made if it does not exist and patterns and a mode are given.

    `consumer` is the client's number for it. No more than the window's messages and bytes are leased to it at once.
    An existing subscription must have the same mode and patterns, where any are given.
    """

    id: Id
    consumer: Id
    subscription: str
    patterns: Sequence[str] = ()
    mode: str = ""
    window_messages: Natural = 256
    window_bytes: Natural = 8 * 2**20
    member: str = ""
    start: Start | None = None  # of a subscription that is made: earliest if nothing is said
    options: WorkOptions | None = None


class Window(Head, tag="window", frozen=True, gc=False):
    """A new window for a consumer; 0 messages: nothing more for now. Not answered."""

    consumer: Id
    messages: Natural
    bytes: Natural


class Ack(Head, tag="ack", frozen=True, gc=False):
    """Whole deliveries, and parts of others, are done. With an id: answered, once all of it so far is stored.

    What comes too late is told in the answer, or without an id in a `late`.
    """

    id: Id
    consumer: Id
    deliveries: Sequence[Natural] = ()
    parts: Sequence[DeliveryPart] = ()
    picked: Sequence[Picked] = ()


class AckUpTo(Head, tag="ack_up_to", frozen=True, gc=False):
    """Everything of a partition that is leased to this consumer, up to an offset and with it, is done."""

    id: Id
    consumer: Id
    topic: str
    partition: Natural
    offset: Natural


class Nack(Head, tag="nack", frozen=True, gc=False):
    """These failed. They come again after a delay: this one, or the subscription's. Not answered."""

    consumer: Id
    parts: Sequence[DeliveryPart]
    delay_ms: Natural | None = None
    reason: str = ""


class Renew(Head, tag="renew", frozen=True, gc=False):
    """These deliveries are still being worked on: lease them anew, from now on. Not answered."""

    consumer: Id
    deliveries: Sequence[Natural]
    lease_ms: Natural | None = None  # for so long, instead of the subscription's


class Recalled(Head, tag="recalled", frozen=True, gc=False):
    """Of what was recalled, these are not worked on: dropped, or given up. Not answered."""

    consumer: Id
    parts: Sequence[DeliveryPart]


class Leave(Head, tag="leave", frozen=True, gc=False):
    """Take no part any more. What is leased goes back and does not count as failed. Answered by `done`."""

    id: Id
    consumer: Id


class ListSubscriptions(Head, tag="subscriptions", frozen=True, gc=False):
    """Subscriptions in order of their names, from behind `after` on, or the one of this name with its partitions.

    A limit of 0 is a client that does not page: it gets all of them, or an error.
    """

    id: Id
    name: str | None = None
    after: str = ""
    limit: Natural = 0


class MakeSubscription(Head, tag="subscription_make", frozen=True, gc=False):
    id: Id
    name: str
    patterns: Sequence[str]
    mode: str
    start: Start | None = None
    options: WorkOptions | None = None


class DeleteSubscription(Head, tag="subscription_delete", frozen=True, gc=False):
    id: Id
    name: str


class PauseSubscription(Head, tag="subscription_pause", frozen=True, gc=False):
    """Deliver nothing more for now, or go on. What is leased stays so."""

    id: Id
    name: str
    is_paused: bool


class MoveSubscription(Head, tag="subscription_move", frozen=True, gc=False):
    """Begin elsewhere: earliest, latest, a time, or offsets of some partitions. Leases end, and do not count."""

    id: Id
    name: str
    start: Start
    member: str | None = None  # of a multicast: this one alone


class RemoveMember(Head, tag="member_remove", frozen=True, gc=False):
    id: Id
    name: str
    member: str


class DeadLettersHead(Head, tag="dead", frozen=True, gc=False):
    """Dead letters of a subscription that nobody has sent back or dropped, from an offset of its topic on."""

    id: Id
    subscription: str
    offset: Natural = 0
    messages_max: Natural = 100


class SettleDead(Head, tag="dead_settle", frozen=True, gc=False):
    """Send dead letters back to their subscription, or drop them: these offsets of `!dead/…`, or all."""

    id: Id
    subscription: str
    is_redriven: bool
    offsets: Sequence[Natural] = ()
    is_all: bool = False


# --- Answers, and what the broker says by itself ---


class Consuming(Head, tag="consuming", frozen=True, gc=False):
    id: Id
    consumer: Id
    subscription: str
    mode: str
    patterns: Sequence[str]
    options: WorkOptions  # in effect: nothing in it is None
    member: str = ""


class WorkHead(Head, tag="work", frozen=True, gc=False):
    """Messages leased to a consumer: as many blocks behind the head as there are leases."""

    consumer: Id
    leases: Sequence[Lease]


class Recall(Head, tag="recall", frozen=True, gc=False):
    """Do not begin these; say `recalled` of those dropped now, and of others as soon as their work ends."""

    consumer: Id
    parts: Sequence[DeliveryPart]


class Late(Head, tag="late", frozen=True, gc=False):
    """Acks or nacks that came too late: the lease had ended, and the messages go, or went, to somebody again."""

    consumer: Id
    parts: Sequence[DeliveryPart]


class ConsumerEnded(Head, tag="consumer_ended", frozen=True, gc=False):
    """The broker has ended a consumer: its subscription was deleted, or another took its member's place."""

    consumer: Id
    code: str
    text: str
    retriable: bool


class AckedHead(Head, tag="acked", frozen=True, gc=False):
    """Everything this consumer had acknowledged is stored, but for these parts, which came too late."""

    id: Id
    late: Sequence[DeliveryPart] = ()


class SubscriptionListHead(Head, tag="subscription_list", frozen=True, gc=False):
    id: Id
    subscriptions: Sequence[SubscriptionState]
    is_complete: bool = True


class DeadList(Head, tag="dead_list", frozen=True, gc=False):
    """Blocks behind the head; the next page begins at `next_offset`, which is 0 behind the last."""

    id: Id
    next_offset: int


class SettledHead(Head, tag="settled", frozen=True, gc=False):
    id: Id
    messages: int


WorkRequest: TypeAlias = (
    Consume
    | Window
    | Ack
    | AckUpTo
    | Nack
    | Renew
    | Recalled
    | Leave
    | ListSubscriptions
    | MakeSubscription
    | DeleteSubscription
    | PauseSubscription
    | MoveSubscription
    | RemoveMember
    | DeadLettersHead
    | SettleDead
)
WorkAnswer: TypeAlias = (
    Consuming
    | WorkHead
    | Recall
    | Late
    | ConsumerEnded
    | AckedHead
    | SubscriptionListHead
    | DeadList
    | SettledHead
)
