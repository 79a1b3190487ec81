"""Histories in which a partition moves from owner to owner, with consumers that keep what they have, or do not come.

Each owner is a group of its own. What passes between them is what a state journal stores: acks, failures, and who held
what. The checks are made as things happen: nothing is delivered while an owner waits, nothing that is done is leased,
nothing is leased twice, keys stay in order with one consumer at a time, and a move is no failure.
"""

from __future__ import annotations

from random import Random
from typing import Final

from runnel.formats.work_heads import DeliveryPart
from runnel.group_rules import masks
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.awaited_holders import HOLDERS_WAIT_NS, AwaitedHolders
from runnel.group_rules.definition import SubscriptionOptions
from runnel.group_rules.effects import Adopted, Effects, Failure
from runnel.group_rules.group import Group
from runnel.group_rules.records import HeldBy
from runnel.topics.names import TopicPartition

KEY: Final[TopicPartition] = ("t", 0)
SECOND: Final = 1_000_000_000
OPTIONS: Final = SubscriptionOptions(retry_delay_ns=0, deliveries_max=0)
_CONSUMERS: Final = 3
_ROUNDS: Final = 60
_PAGE: Final = 7


class WrongMoveError(AssertionError):
    """A promise was broken."""


class Client:
    """A consumer, as its program sees it: which messages it has, and which of them were recalled."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.has: dict[int, int] = {}  # offset to delivery
        self.recalled: dict[int, int] = {}  # and work on them goes on
        self.is_here = True  # at the present owner
        # At the former owner, until it has come to the present one.
        self.had: dict[int, int] = {}
        self.had_recalled: dict[int, int] = {}

    @property
    def holder(self) -> str:
        return f"h{self.number}"


class MovesHistory:
    """One partition, its present owner, and three consumers."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.is_keyed = random.random() < 0.6
        keys = [None, b"a", b"b", b"c"][: random.randint(1, 4)]
        self.keys: list[bytes | None] = [None]  # by offset, from 1 on
        self._keys = keys if self.is_keyed else [None]
        self.now_ns = SECOND
        self.acked = AckSet()
        self.failures: dict[int, Failure] = {}
        self.counted: dict[int, int] = {}  # nacks by offset, as the clients sent them
        self.clients = [Client(number) for number in range(1, _CONSUMERS + 1)]
        self.group = self._new_group()
        self.group.add_partition(KEY, AckSet(), now_ns=self.now_ns)

    def play(self) -> None:
        for _ in range(_ROUNDS):
            self.step()
        self.finish()

    def step(self) -> None:
        event = self.random.choices(
            (self.publish, self.serve, self.ack, self.nack, self.confirm, self.move, self.vanish),
            (4, 6, 6, 2, 3, 1, 0.3),
        )[0]
        event()

    def finish(self) -> None:
        """Nothing is lost: everything that is owed is delivered, and can be acknowledged."""
        for _ in range(4 * len(self.keys) + 10):
            self.confirm(everything=True)
            self.serve()
            self.ack(everything=True)
            self.now_ns += SECOND
            self._apply(self.group.expire(self.now_ns))
        left = self.acked.missing(1, len(self.keys))
        if list(left):
            raise WrongMoveError(f"owed and never delivered: {list(left)}")

    # --- Events ---

    def _new_group(self) -> Group:
        group = Group(OPTIONS, is_keyed=self.is_keyed, first_delivery_id=self.random.randint(1, 99))
        for client in self.clients:
            group.join(
                client.number, window_messages=self.random.randint(1, 12), window_bytes=10_000
            )
        return group

    def publish(self) -> None:
        self.keys += self.random.choices(self._keys, k=self.random.randint(1, 6))
        self.group.extend(KEY, len(self.keys))

    def serve(self) -> None:
        """Offer what is wanted, a page at a time."""
        is_waiting = self.group.awaited(KEY) is not None
        while (want := self.group.next_want(self.now_ns)) is not None:
            end = min(want.begin + _PAGE, len(self.keys))
            rows = self.keys[want.begin : end]
            offer = self.group.offer(
                KEY, want.begin, len(rows), len(rows), self.now_ns, rows if self.is_keyed else None
            )
            if is_waiting and offer:
                raise WrongMoveError("delivered before the wait was over")
            for delivery in offer:
                told = {offset: count for offset, count, _ in delivery.attempts}
                for offset in masks.offsets(delivery.base, delivery.mask):
                    if told.get(offset, 0) != self.counted.get(offset, 0):
                        raise WrongMoveError(f"{offset} failed {self.counted.get(offset, 0)} times")
                    self._leased(self._client(delivery.consumer), offset, delivery.id)
            if not offer and want == self.group.next_want(self.now_ns):
                raise WrongMoveError(f"asks for {want} again and again")

    def ack(self, *, everything: bool = False) -> None:
        for client in self._here():
            for offset, delivery in list(client.has.items()):
                if everything or self.random.random() < 0.4:
                    del client.has[offset]
                    part = DeliveryPart(delivery, offset, offset + 1)
                    effects = self.group.ack(client.number, (), [part], self.now_ns)
                    if effects.late:
                        raise WrongMoveError(f"the ack of {offset} is late")
                    self._apply(effects)

    def nack(self) -> None:
        client = self.random.choice(self._here())
        for offset, delivery in list(client.has.items())[:1]:
            del client.has[offset]
            self.counted[offset] = self.counted.get(offset, 0) + 1
            part = DeliveryPart(delivery, offset, offset + 1)
            self._apply(
                self.group.nack(client.number, [part], self.now_ns, delay_ns=0, reason="no")
            )

    def confirm(self, *, everything: bool = False) -> None:
        for client in self._here():
            for offset, delivery in list(client.recalled.items()):
                if everything or self.random.random() < 0.3:
                    del client.recalled[offset]
                    part = DeliveryPart(delivery, offset, offset + 1)
                    self._apply(self.group.recalled(client.number, [part], self.now_ns))

    def vanish(self) -> None:
        """A consumer leaves in good order, and comes back."""
        client = self.random.choice(self.clients)
        client.has.clear()
        client.recalled.clear()
        self._apply(self.group.leave(client.number, self.now_ns, is_clean=True))
        self.group.join(client.number, window_messages=5, window_bytes=10_000)

    def move(self) -> None:
        """The owner notes who holds what, and another one begins with what is stored."""
        held = [
            HeldBy(
                f"h{lease.consumer.number}",
                lease.id,
                lease.base,
                masks.to_bytes(lease.outstanding),
                masks.to_bytes(lease.recalled),
                lease.cost_bytes,
                lease.delivered_ns,
            )
            for lease in self.group.leases_of(KEY)
        ]
        failed = self.group.remove_partition(KEY).failed
        if failed:
            raise WrongMoveError("a move counts as a failure")
        self._settle_elsewhere()
        self.group = self._new_group()
        acked = self.acked.copy()
        awaited = AwaitedHolders(held, self.now_ns + HOLDERS_WAIT_NS)
        self.group.add_partition(
            KEY, acked, dict(self.failures), now_ns=self.now_ns, awaited=awaited
        )
        self.group.extend(KEY, len(self.keys))
        for client in self.clients:
            client.is_here = False
            client.had, client.had_recalled = client.has, client.recalled
            client.has, client.recalled = {}, {}
        coming = [client for client in self.clients if self.random.random() < 0.8]
        for client in coming:
            self.serve()
            self._come(client, held)
            client.is_here = True
            if self.random.random() < 0.2 and self._adopt(client):
                raise WrongMoveError(f"{client.holder} was given the same twice")
            if self.random.random() < 0.3:
                self.ack()
        for client in self.clients:
            if client not in coming:
                client.had, client.had_recalled = {}, {}
                client.is_here = True
        self.serve()
        if self.random.random() < 0.8:
            self.now_ns += HOLDERS_WAIT_NS
            self._apply(self.group.expire(self.now_ns))

    def _settle_elsewhere(self) -> None:
        """A message that is held may be done before the next owner begins: a dead letter of it was stored."""
        for client in self.clients:
            for offset in list(client.has):
                if self.random.random() < 0.1:
                    self.acked.add(offset, offset + 1)
                    del client.has[offset]

    def _come(self, client: Client, held: list[HeldBy]) -> None:
        former = {each.delivery: each for each in held if each.holder == client.holder}
        has, recalled = client.had, client.had_recalled
        client.had, client.had_recalled = {}, {}
        for each in self._adopt(client):
            for offset in masks.offsets(each.base, each.outstanding):
                if offset in self.acked:
                    raise WrongMoveError(f"{offset} is done, and was leased again")
                if has.get(offset) != each.former:
                    raise WrongMoveError(f"{client.holder} never had {offset}")
                client.has[offset] = each.delivery
            for offset in masks.offsets(each.base, each.recalled):
                client.recalled[offset] = each.delivery
            del former[each.former]
        is_all = has.keys() <= client.has.keys() and recalled.keys() <= client.recalled.keys()
        if former or not is_all:
            raise WrongMoveError(f"{client.holder} has lost {has} or {recalled}: {former}")

    def _adopt(self, client: Client) -> list[Adopted]:
        keys = dict(enumerate(self.keys))
        return self.group.adopt(KEY, client.holder, client.number, self.now_ns, row_keys=keys)

    # --- Checks ---

    def _here(self) -> list[Client]:
        return [client for client in self.clients if client.is_here]

    def _client(self, number: int) -> Client:
        return self.clients[number - 1]

    def _leased(self, client: Client, offset: int, delivery: int) -> None:
        if offset in self.acked:
            raise WrongMoveError(f"{offset} is done, and was delivered again")
        for other in self.clients:
            if offset in other.has or offset in other.had:
                raise WrongMoveError(f"{offset} was delivered while {other.holder} had it")
        key = self.keys[offset]
        if key is not None:
            for other in self.clients:
                busy = {*other.recalled, *other.had_recalled}
                if other is not client:
                    busy |= {*other.has, *other.had}
                if any(self.keys[each] == key for each in busy):
                    raise WrongMoveError(f"{offset}: {other.holder} works on {key!r}")
            for before in range(1, offset):
                is_owed = self.keys[before] == key and before not in self.acked
                if is_owed and before not in client.has:
                    raise WrongMoveError(f"{offset} was delivered before {before} of {key!r}")
        client.has[offset] = delivery

    def _apply(self, effects: Effects) -> None:
        for _, begin, end in effects.acked:
            self.acked.add(begin, end)
        for _, base, mask in effects.picked:
            self.acked.add_scattered(base, mask)
        for _, offset, count, not_before_ns, first_ns, reason in effects.failed:
            self.failures[offset] = Failure(count, not_before_ns, first_ns, reason)
        for consumer, part in effects.recalls:
            client = self._client(consumer)
            for offset in range(part.begin, part.end):
                client.recalled[offset] = client.has.pop(offset)
