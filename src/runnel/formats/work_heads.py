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

A delivery is a range of one partition, leased to one consumer; the broker chooses its id. Offsets name parts of it:
`[7, 18, 20]` are the messages 18 and 19 of delivery 7. Bits name scattered messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from runnel.formats.heads import Head, Id, Natural, Start


class DeliveryPart(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Messages of a delivery: the offsets from `begin` to `end` (not included)."""

    delivery: Natural
    begin: Natural
    end: Natural


PICKED_BYTES_MAX: Final = 512
"""The limit of `Picked.bits`: no delivery spans more than 4,096 messages."""


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
    """A subscription's leases, retries and limits. None, or no options: the broker's defaults."""

    lease_ms: Natural | None = None
    processing_ms_max: Natural | None = None
    deliveries_max: Natural | None = None  # 0: no limit, nothing becomes a dead letter
    retry_delay_ms: Natural | None = None
    retry_delay_ms_max: Natural | None = None
    backoff: float | None = None  # the factor from one delay to the next
    absent_ms_max: Natural | None = None  # of a member of a multicast


class MemberState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A member of a multicast, or the consumers of another mode taken together (without a name)."""

    name: str
    consumers: int
    backlog: int  # messages not acknowledged, those in flight included
    in_flight: int
    delayed: int  # messages that wait for their next attempt
    oldest_ns: int  # when the oldest message not acknowledged was received; 0: there is none
    absent_ns: int = 0  # since when it has no consumer; 0: it has one


class PartitionWork(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A member's progress in a partition: everything before `floor` is acknowledged."""

    member: str
    topic: str
    partition: int
    floor: int
    next_offset: int  # of the partition
    acked_beyond: int  # messages at `floor` or behind it that are acknowledged
    in_flight: int


class SubscriptionState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A subscription as `subscriptions` lists it. `partitions` is empty unless it was requested by its name."""

    name: str
    mode: str
    patterns: Sequence[str]
    is_paused: bool
    made_ns: int
    options: WorkOptions
    members: Sequence[MemberState]
    redelivered: int  # since the broker started
    dead: int  # dead letters that were not sent back or dropped
    partitions: Sequence[PartitionWork] = ()


# --- Requests ---


class Consume(Head, tag="consume", frozen=True, gc=False):
    """Join a subscription, which is made if it does not exist and patterns and a mode are given.

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
    start: Start | None = None  # of a new subscription; None: earliest
    options: WorkOptions | None = None


class ConsumePart(Head, tag="consume_part", frozen=True, gc=False):
    """`consume` by a consumer that joins at every node: this is its part at one of them, with a share of its window.

    `holder` is an id that the consumer has drawn for itself, the same at all nodes: it says who has a message when the
    message's shard moves from one node to another.
    """

    id: Id
    consumer: Id
    holder: str
    subscription: str
    patterns: Sequence[str] = ()
    mode: str = ""
    window_messages: Natural = 256
    window_bytes: Natural = 8 * 2**20
    member: str = ""
    start: Start | None = None
    options: WorkOptions | None = None

    def to_consume(self) -> Consume:
        """The same by a consumer of this node alone."""
        return Consume(
            self.id,
            self.consumer,
            self.subscription,
            self.patterns,
            self.mode,
            self.window_messages,
            self.window_bytes,
            self.member,
            self.start,
            self.options,
        )


class GiveBack(Head, tag="give_back", frozen=True, gc=False):
    """Return messages on which no work has begun: they are due again at once, and no failure counts. Not answered."""

    consumer: Id
    parts: Sequence[DeliveryPart]


class Window(Head, tag="window", frozen=True, gc=False):
    """Set a consumer's window; 0 messages: deliver nothing for now. Not answered."""

    consumer: Id
    messages: Natural
    bytes: Natural


class WindowShare(Head, tag="window_share", frozen=True, gc=False):
    """`window` for a part: `moves` is how many `moving` of this node it knew when it was sent. Not answered.

    What has moved since still takes room in the consumer's window: the node takes it from this share.
    """

    consumer: Id
    messages: Natural
    bytes: Natural
    moves: Natural


class Ack(Head, tag="ack", frozen=True, gc=False):
    """Acknowledge whole deliveries, and parts of others. With an id: answered once all acks so far are stored.

    The answer lists what came too late; without an id a `late` does.
    """

    id: Id
    consumer: Id
    deliveries: Sequence[Natural] = ()
    parts: Sequence[DeliveryPart] = ()
    picked: Sequence[Picked] = ()


class AckUpTo(Head, tag="ack_up_to", frozen=True, gc=False):
    """Acknowledge everything of a partition that is leased to this consumer, up to an offset and including it."""

    id: Id
    consumer: Id
    topic: str
    partition: Natural
    offset: Natural


class Nack(Head, tag="nack", frozen=True, gc=False):
    """These messages failed. They are delivered again after this delay, or the subscription's. Not answered."""

    consumer: Id
    parts: Sequence[DeliveryPart]
    delay_ms: Natural | None = None
    reason: str = ""


class Renew(Head, tag="renew", frozen=True, gc=False):
    """Renew the leases of deliveries that are still being processed. Not answered."""

    consumer: Id
    deliveries: Sequence[Natural]
    lease_ms: Natural | None = None  # from now on; None: the subscription's


class Recalled(Head, tag="recalled", frozen=True, gc=False):
    """These recalled messages are not being processed: they were dropped, or given up. Not answered."""

    consumer: Id
    parts: Sequence[DeliveryPart]


class Leave(Head, tag="leave", frozen=True, gc=False):
    """Leave a subscription. Leased messages go back and do not count as failed. Answered by `done`."""

    id: Id
    consumer: Id


class ListSubscriptions(Head, tag="subscriptions", frozen=True, gc=False):
    """List subscriptions by name, beginning after `after`, or the one of this name with its partitions.

    A limit of 0 means that the client does not page: it gets all of them, or an error.
    """

    id: Id
    name: str | None = None
    after: str = ""
    limit: Natural = 0


class MakeSubscription(Head, tag="subscription_make", frozen=True, gc=False):
    """Make a subscription without joining it."""

    id: Id
    name: str
    patterns: Sequence[str]
    mode: str
    start: Start | None = None
    options: WorkOptions | None = None


class DeleteSubscription(Head, tag="subscription_delete", frozen=True, gc=False):
    """Delete a subscription."""

    id: Id
    name: str


class PauseSubscription(Head, tag="subscription_pause", frozen=True, gc=False):
    """Pause deliveries, or resume them. Leases stay."""

    id: Id
    name: str
    is_paused: bool


class MoveSubscription(Head, tag="subscription_move", frozen=True, gc=False):
    """Move to earliest, latest, a time, or offsets of some partitions. Leases end, and do not count as failed."""

    id: Id
    name: str
    start: Start
    member: str | None = None  # of a multicast: move this member alone


class RemoveMember(Head, tag="member_remove", frozen=True, gc=False):
    """Remove a member of a multicast."""

    id: Id
    name: str
    member: str


class DeadLettersHead(Head, tag="dead", frozen=True, gc=False):
    """List a subscription's dead letters that were not sent back or dropped, from an offset of their topic on."""

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


# --- Answers and notices ---


class Consuming(Head, tag="consuming", frozen=True, gc=False):
    """The answer to `consume`."""

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
    """Do not begin these. Send `recalled` for those dropped now, and for others as soon as their processing ends."""

    consumer: Id
    parts: Sequence[DeliveryPart]


class Late(Head, tag="late", frozen=True, gc=False):
    """Acks or nacks that came too late: the lease had ended, and the messages are delivered again."""

    consumer: Id
    parts: Sequence[DeliveryPart]


class Moving(Head, tag="moving", frozen=True, gc=False):
    """The shard of these deliveries moves to another node, as planned. Keep them: a `held` of its next owner follows.

    `epoch` is that of the shard's term that ends. What is acknowledged here from now on is late.
    """

    consumer: Id
    epoch: Natural
    deliveries: Sequence[Natural]


class HeldLease(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a consumer has of a delivery that another node leased to it: bit i of `bits` is the offset `begin` + i.

    Here it is the delivery `delivery`; there it was `former`, in the term of the shard with this epoch.
    """

    delivery: Natural
    topic: str
    partition: int
    epoch: Natural
    former: Natural
    begin: Natural
    bits: bytes
    recalled: bytes = b""  # recalled by the former owner, and not confirmed


class Held(Head, tag="held", frozen=True, gc=False):
    """This node owns a shard now that has moved, and has leased to the consumer what it had of it."""

    consumer: Id
    leases: Sequence[HeldLease]


class Wants(Head, tag="wants", frozen=True, gc=False):
    """Whether this node has more messages for a consumer's part than its share of the window takes."""

    consumer: Id
    is_wanting: bool


class ConsumerEnded(Head, tag="consumer_ended", frozen=True, gc=False):
    """The broker has ended a consumer: its subscription was deleted, or another consumer took its member's place."""

    consumer: Id
    code: str
    text: str
    retriable: bool


class AckedHead(Head, tag="acked", frozen=True, gc=False):
    """Everything that this consumer acknowledged is stored, except these parts, which came too late."""

    id: Id
    late: Sequence[DeliveryPart] = ()


class SubscriptionListHead(Head, tag="subscription_list", frozen=True, gc=False):
    """The answer to `subscriptions`."""

    id: Id
    subscriptions: Sequence[SubscriptionState]
    is_complete: bool = True


class DeadList(Head, tag="dead_list", frozen=True, gc=False):
    """Blocks behind the head; the next page begins at `next_offset`, which is 0 behind the last."""

    id: Id
    next_offset: int


class SettledHead(Head, tag="settled", frozen=True, gc=False):
    """The answer to `dead_settle`: the number of messages."""

    id: Id
    messages: int


WorkRequest: TypeAlias = (
    Consume
    | Window
    | WindowShare
    | Ack
    | AckUpTo
    | ConsumePart
    | GiveBack
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
    | Moving
    | Held
    | Wants
    | ConsumerEnded
    | AckedHead
    | SubscriptionListHead
    | DeadList
    | SettledHead
)
