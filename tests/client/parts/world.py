"""A cluster made of numbers, one reader with parts at its nodes, and a network that is slow in its own ways.

Shards have owners that change, nodes die and come back, and a node that has lost a shard may not know it for a while.
Frames of one connection arrive in their order; those of different connections whenever chance wants. The reader's
decisions are those of `PartMerge` and `CreditShares`; the rest here is a model, and the check.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from runnel.client.consumer.credit_shares import CreditShares
from runnel.client.consumer.part_merge import Attach, PartMerge
from runnel.client.consumer.subscription_position import SubscriptionPosition
from runnel.formats import wire
from runnel.formats.batch import unpack_blocks
from tests.client.fake_server import stored_batch

BUFFERS = (1_000, 3_000, 12_000)  # bytes; a delivery has 400 to 2,000
Key = tuple[str, int]


class Broken(AssertionError):
    """The reader broke a promise."""


@dataclass(slots=True)
class Entry:
    topic: str
    offset: int
    count: int


@dataclass(slots=True)
class Shard:
    """What is stored of a shard, and who owns it."""

    key: Key
    entries: list[Entry] = field(default_factory=list)  # entry n is entries[n - 1]
    next_offsets: dict[str, int] = field(default_factory=dict)
    floor: int = 1  # entries before it are gone
    epoch: int = 0
    owner: str = ""

    @property
    def next_entry(self) -> int:
        return len(self.entries) + 1


@dataclass(slots=True)
class Feed:
    """A shard that a node reads for a part."""

    epoch: int
    entry: int
    places: dict[str, int] | None  # by topic, for a reader without wildcards
    last: list[tuple[str, int]]  # last values that are still to be sent
    ends_last: bool


@dataclass(slots=True)
class NodePart:
    """One connection's part at its node."""

    credit: int = 0
    feeds: dict[Key, Feed] = field(default_factory=dict)
    claimed: dict[Key, int] = field(default_factory=dict)
    up: deque[wire.Head | None] = field(default_factory=deque)  # client to node
    down: deque[tuple[wire.Head, bytes]] = field(default_factory=deque)
    is_open: bool = True
    is_subscribed: bool = False


@dataclass(slots=True)
class Node:
    name: str
    is_alive: bool = True
    # Shards that it believes to own, with the epoch, and the entry behind the last that it can know.
    owned: dict[Key, tuple[int, int | None]] = field(default_factory=dict)
    parts: dict[int, NodePart] = field(default_factory=dict)


class World:
    """One history: random steps, then quiet, then the check."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        dice = self.random
        self.is_literal = dice.random() < 0.5
        self.kind = dice.choice(["latest", "latest", "earliest", "last"])
        self.nodes = {f"n{i}": Node(f"n{i}") for i in range(dice.randint(2, 4))}
        self.shards = {("j", i): Shard(("j", i)) for i in range(dice.randint(1, 5))}
        self.topics = {f"t{i}": dice.choice(list(self.shards)) for i in range(dice.randint(1, 6))}
        self.existing: set[Key] = set()  # shards that a topic uses already
        self.retains = dice.random() < 0.3
        self.transcript: list[str] = []
        start = wire.Start(self.kind)
        patterns = list(self.topics) if self.is_literal else ["t*"]
        self.merge = PartMerge(SubscriptionPosition(patterns, start), start)
        self.buffer_bytes = dice.choice(BUFFERS)
        self.shares = CreditShares(self.buffer_bytes)
        self.part_of: dict[str, int] = {}
        self.parts = 0
        self.attaches: dict[tuple[int, int], Attach] = {}
        self.arrived: deque[tuple[int, int]] = deque()  # part, size
        self.got: dict[str, list[int]] = {topic: [] for topic in self.topics}
        self.gaps: dict[str, list[tuple[int, int]]] = {topic: [] for topic in self.topics}
        self.ends_at_start: dict[str, int] = {}
        self.ends_at_begin: dict[str, int] | None = None
        self.size_max = 0
        # A node did not know that it had lost a shard before the subscription had begun. It may have begun there.
        self.was_unaware = False

    # --- Steps ---

    def run(self) -> None:
        for _ in range(self.random.randint(0, 30)):
            self.random.choice([self.publish, self.take_shards, self.move])()
        self.take_shards()
        self.ends_at_start = self.ends()
        self.connect()
        actions = [
            (self.publish, 8),
            (self.move, 2),
            (self.kill, 0.5),
            (self.revive, 0.7),
            (self.notice, 2),
            (self.take_shards, 2),
            (self.connect, 3),
            (self.node_step, 12),
            (self.frame_up, 8),
            (self.frame_down, 12),
            (self.read, self.random.choice([4, 0.2])),
            (self.lose_connection, 0.3),
            (self.retain, 0.5),
        ]
        steps, weights = zip(*actions, strict=True)
        for _ in range(self.random.randint(50, 500)):
            self.random.choices(steps, weights)[0]()
            self.check_progress()
        self.quiet()
        self.check_end()

    def quiet(self) -> None:
        """All nodes live, and everything that can happen happens."""
        for node in self.nodes.values():
            node.is_alive = True
        self.take_shards()
        for round_number in range(3000):
            if round_number % 20 == 0:
                self.connect()
            self.notice(is_all=True)
            self.take_shards()
            for step in (self.frame_up, self.node_step, self.frame_down, self.read):
                for _ in range(4):
                    step()
            self.check_progress()
            if self.is_over():
                return
        raise Broken(
            f"the reader never got everything: unread {self.merge.unread}, begun {self.merge.has_begun}, "
            f"got { {topic: got[-1:] for topic, got in self.got.items()} } of {self.ends()}"
        )

    def is_over(self) -> bool:
        if not self.merge.is_covered or self.arrived:
            return False
        if any(
            part.up or part.down for node in self.nodes.values() for part in node.parts.values()
        ):
            return False
        return all(
            not feed.last and self.next_of(key, feed) is None
            for node in self.nodes.values()
            for part in node.parts.values()
            for key, feed in part.feeds.items()
        )

    # --- The cluster ---

    def ends(self) -> dict[str, int]:
        return {
            topic: self.shards[key].next_offsets.get(topic, 1) for topic, key in self.topics.items()
        }

    def alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_alive]

    def publish(self) -> None:
        topic = self.random.choice(list(self.topics))
        shard = self.shards[self.topics[topic]]
        if not shard.owner and not shard.entries and shard.key not in self.existing:
            self.own(shard, self.random.choice(self.alive()))
        if not shard.owner or shard.key not in self.nodes[shard.owner].owned:
            return
        self.existing.add(shard.key)
        count = self.random.randint(1, 3)
        offset = shard.next_offsets.get(topic, 1)
        shard.entries.append(Entry(topic, offset, count))
        shard.next_offsets[topic] = offset + count

    def own(self, shard: Shard, node: Node) -> None:
        if shard.key in node.owned:
            self.give_up(node, shard.key)  # it did not know yet that it had lost it
        shard.epoch += 1
        shard.owner = node.name
        node.owned[shard.key] = (shard.epoch, None)
        for part in node.parts.values():
            if part.is_subscribed:
                self.claim(part, [(shard.key, shard.epoch)])

    def take_shards(self) -> None:
        """Shards without a living owner are taken."""
        for shard in self.shards.values():
            owner = self.nodes.get(shard.owner)
            is_owned = owner is not None and shard.key in owner.owned
            if shard.key in self.existing and not is_owned and (alive := self.alive()):
                self.own(shard, self.random.choice(alive))

    def move(self) -> None:
        """A planned move: the former owner knows at once. Or it was taken away: it hears of it later."""
        shard = self.random.choice(list(self.shards.values()))
        others = [node for node in self.alive() if node.name != shard.owner]
        if shard.key not in self.existing or not others or not shard.owner:
            return
        former = self.nodes[shard.owner]
        if shard.key not in former.owned:
            return  # it has died
        if self.random.random() < 0.7:
            self.give_up(former, shard.key)
            if self.random.random() < 0.3:
                shard.owner = ""  # nobody has it for a while
                return
        else:
            former.owned[shard.key] = (former.owned[shard.key][0], shard.next_entry)
            self.was_unaware = self.was_unaware or not self.merge.has_begun
        self.own(shard, self.random.choice(others))

    def give_up(self, node: Node, key: Key) -> None:
        epoch, _ = node.owned.pop(key)
        for part in node.parts.values():
            part.feeds.pop(key, None)
            part.claimed.pop(key, None)
            if part.is_subscribed:
                part.down.append((wire.ShardsLeft(1, [wire.ShardTerm(*key, epoch)]), b""))

    def notice(self, *, is_all: bool = False) -> None:
        """Nodes hear that they have lost shards."""
        for node in self.nodes.values():
            for key, (epoch, _) in list(node.owned.items()):
                is_lost = self.shards[key].epoch != epoch
                if is_lost and (is_all or self.random.random() < 0.5):
                    self.give_up(node, key)

    def retain(self) -> None:
        if self.retains:
            shard = self.random.choice(list(self.shards.values()))
            shard.floor = min(shard.next_entry, shard.floor + self.random.randint(0, 3))

    def kill(self) -> None:
        if len(alive := self.alive()) > 1:
            node = self.random.choice(alive)
            node.is_alive = False
            node.owned.clear()
            for part in node.parts.values():
                part.is_open = False
                for _ in range(self.random.randint(0, len(part.down))):
                    part.down.pop()  # what was under way is lost

    def revive(self) -> None:
        self.random.choice(list(self.nodes.values())).is_alive = True

    # --- A node's side of its parts ---

    def claim(self, part: NodePart, shards: Iterable[tuple[Key, int]]) -> None:
        terms = []
        for key, epoch in shards:
            part.claimed[key] = epoch
            terms.append(wire.ShardTerm(*key, epoch))
        part.down.append((wire.ShardsCame(1, terms), b""))

    def node_step(self) -> None:
        """A node reads a few entries for one of its parts."""
        pairs = [(n, p) for n in self.alive() for p in n.parts.values() if p.feeds and p.is_open]
        if not pairs:
            return
        node, part = self.random.choice(pairs)
        if part.credit <= 0:
            return
        key, feed = self.random.choice(list(part.feeds.items()))
        if feed.last or feed.ends_last:
            self.send_last(part, key, feed)
            return
        self.send_next(node, part, key, feed)

    def send_last(self, part: NodePart, key: Key, feed: Feed) -> None:
        if feed.last:
            topic, offset = feed.last.pop()
            self.deliver(part, key, feed.epoch, 0, [Entry(topic, offset, 1)])
            return
        feed.ends_last = False
        part.down.append((wire.Deliver(1, *key, feed.epoch, 0), b""))

    def next_of(self, key: Key, feed: Feed) -> int | None:
        """The entry that a feed reads next, as an index into the shard's entries."""
        shard = self.shards[key]
        for index in range(feed.entry - 1, len(shard.entries)):
            entry = shard.entries[index]
            if feed.places is None or entry.offset >= feed.places.get(entry.topic, 1):
                return index
        return None

    def send_next(self, node: Node, part: NodePart, key: Key, feed: Feed) -> None:
        shard = self.shards[key]
        _, end = node.owned[key]
        known = shard.entries if end is None else shard.entries[: end - 1]
        if feed.entry < shard.floor:
            gone = [
                entry
                for entry in known[feed.entry - 1 : shard.floor - 1]
                if feed.places is None or entry.offset >= feed.places.get(entry.topic, 1)
            ]
            for entry in gone:
                named = (entry.topic, 0) if feed.places is not None else ("", 0)
                text = f"{entry.topic} {entry.offset} {entry.offset + entry.count}"
                gap = wire.GapState(
                    "retention", entry.count, *named, entry.offset, entry.offset + entry.count, text
                )
                part.down.append((wire.GapNotice(1, gap, *key), b""))
                if feed.places is not None:
                    feed.places[entry.topic] = entry.offset + entry.count
            feed.entry = min(shard.floor, len(known) + 1)
            if feed.places is None:
                part.down.append((wire.Deliver(1, *key, feed.epoch, feed.entry), b""))
            return
        chosen: list[Entry] = []
        count = self.random.randint(1, 3)
        while feed.entry <= len(known) and len(chosen) < count:
            entry = known[feed.entry - 1]
            feed.entry += 1
            if feed.places is not None:
                place = feed.places.get(entry.topic, 1)
                if entry.offset + entry.count <= place:
                    continue
                entry = Entry(
                    entry.topic,
                    max(entry.offset, place),
                    min(entry.count, entry.offset + entry.count - place),
                )
                feed.places[entry.topic] = entry.offset + entry.count
            chosen.append(entry)
        if chosen:
            self.deliver(part, key, feed.epoch, feed.entry, chosen)

    def deliver(
        self, part: NodePart, key: Key, epoch: int, next_entry: int, entries: Sequence[Entry]
    ) -> None:
        blocks = b"".join(
            stored_batch(e.topic, e.offset, [b"%d" % (e.offset + i) for i in range(e.count)]).pack()
            for e in entries
        )
        part.credit -= len(blocks)
        self.size_max = max(self.size_max, len(blocks))
        part.down.append((wire.Deliver(1, *key, epoch, next_entry), blocks))

    def take_request(self, node: Node, part: NodePart, request: Any) -> None:
        match request:
            case wire.Subscribe():
                part.credit += request.credit_bytes
                elsewhere = [
                    wire.Owner(*key, 0) for key in sorted(self.existing) if key not in node.owned
                ]
                part.down.append((wire.Subscribed(request.id, 1, elsewhere=elsewhere), b""))
                part.is_subscribed = True
                self.claim(part, [(key, epoch) for key, (epoch, _) in node.owned.items()])
                if request.start.kind == "last":
                    part.down.append((wire.Deliver(1, "live", 0, 0, 0), b""))
            case wire.Credit():
                part.credit += request.credit_bytes - request.less_bytes
            case wire.ShardsFrom():
                self.begin(node, part, request)

    def begin(self, node: Node, part: NodePart, request: wire.ShardsFrom) -> None:
        start = request.start
        partitions: list[wire.PartitionPlace] = []
        shards: list[wire.ShardPlace] = []
        given = {place.topic: place.offset for place in start.partitions}
        entries = {(place.journal, place.shard): place.entry for place in start.shards}
        if self.random.random() < 0.03:
            part.down.append((wire.Error(request.id, "unavailable", "", retriable=True), b""))
            return
        for term in request.shards:
            key = (term.journal, term.shard)
            epoch, end = node.owned.get(key, (0, None))
            if epoch != term.epoch:
                continue
            shard = self.shards[key]
            known = shard.entries if end is None else shard.entries[: end - 1]
            ends: dict[str, int] = {}
            for entry in known:
                ends[entry.topic] = entry.offset + entry.count
            entry_at = len(known) + 1 if start.kind in ("latest", "last") else 1
            if start.kind.startswith("resume"):
                entry_at = entries.get(key, 1)
            elif start.kind == "earliest":
                entry_at = shard.floor
            places: dict[str, int] | None = None
            if self.is_literal:
                places = {}
                for topic, behind in ends.items():
                    if start.kind in ("latest", "last"):
                        places[topic] = behind
                    elif start.kind.startswith("resume") and topic in given:
                        places[topic] = given[topic]
                    else:
                        first = next(
                            e.offset
                            for e in [*shard.entries[shard.floor - 1 :], Entry(topic, behind, 0)]
                            if e.topic == topic
                        )
                        places[topic] = first if start.kind == "earliest" else 1
                partitions += [wire.PartitionPlace(t, 0, o, 1) for t, o in places.items()]
                entry_at = 1
            last: list[tuple[str, int]] = []
            if start.kind in ("last", "resume_last"):
                before: dict[str, int] = {}
                for number, entry in enumerate(known, 1):
                    limit = places[entry.topic] if places is not None else None
                    if number >= shard.floor and (
                        (limit is None and number < entry_at)
                        or (limit is not None and entry.offset < limit)
                    ):
                        before[entry.topic] = entry.offset + entry.count - 1
                last = list(before.items())
            shards.append(wire.ShardPlace(*key, epoch, entry_at))
            part.feeds[key] = Feed(
                epoch, entry_at, places, last, start.kind in ("last", "resume_last")
            )
        answer = wire.Subscribed(request.id, 1, partitions, shards)
        part.down.append((answer, b""))

    # --- The network ---

    def open_parts(self) -> list[tuple[Node, int, NodePart]]:
        return [
            (node, number, part)
            for node in self.nodes.values()
            for number, part in node.parts.items()
        ]

    def frame_up(self) -> None:
        waiting = [(n, p) for n, _, p in self.open_parts() if p.up and n.is_alive and p.is_open]
        if waiting:
            node, part = self.random.choice(waiting)
            self.take_request(node, part, part.up.popleft())

    def frame_down(self) -> None:
        waiting = self.open_parts()
        if not waiting:
            return
        node, number, part = self.random.choice(waiting)
        if part.down:
            self.receive(number, *part.down.popleft())
        elif not part.is_open:
            del node.parts[number]
            self.lose(number)

    def lose_connection(self) -> None:
        waiting = self.open_parts()
        if waiting:
            _, _, part = self.random.choice(waiting)
            part.is_open = False
            for _ in range(self.random.randint(0, len(part.down))):
                part.down.pop()

    # --- The reader ---

    def connect(self) -> None:
        """The reader hears of the nodes, and connects to those that live."""
        self.merge.expect([node.name for node in self.alive()])
        for node in self.alive():
            if node.name not in self.part_of:
                self.parts += 1
                number = self.part_of[node.name] = self.parts
                part = node.parts[number] = NodePart()
                start = self.merge.open(number, node.name)
                credit, less = self.shares.open(number)
                part.up.append(wire.Subscribe(1, 1, ["t*"], start, credit))
                self.send_credit({}, less)

    def lose(self, number: int) -> None:
        self.merge.lost(number)
        self.shares.close(number)
        self.part_of = {name: part for name, part in self.part_of.items() if part != number}
        self.send_credit(self.shares.due(), {})

    def ask(self, attaches: Iterable[Attach]) -> None:
        for attach in attaches:
            self.attaches[attach.part, attach.number + 1] = attach
            request = wire.ShardsFrom(attach.number + 1, 1, attach.shards, attach.start)
            if part := self.node_part(attach.part):
                part.up.append(request)

    def node_part(self, number: int) -> NodePart | None:
        return next((p for _, n, p in self.open_parts() if n == number), None)

    def send_credit(self, more: dict[int, int], less: dict[int, int]) -> None:
        for number in {*more, *less}:
            if part := self.node_part(number):
                part.up.append(wire.Credit(1, more.get(number, 0), less.get(number, 0)))

    def receive(self, number: int, head: Any, tail: bytes) -> None:
        match head:
            case wire.Subscribed() if head.id == 1:
                self.merge.answered(head.elsewhere)
            case wire.Subscribed():
                self.merge.placed(self.attaches.pop((number, head.id)), head)
            case wire.Error():
                self.merge.refused(self.attaches.pop((number, head.id)))
                self.ask(self.merge.retry())
            case wire.ShardsCame():
                self.ask(self.merge.came(number, head.shards))
            case wire.ShardsLeft():
                self.merge.left(number, head.shards)
            case wire.GapNotice():
                self.report(self.merge.missed(number, head))
            case wire.Deliver():
                self.take(number, head, tail)
        if self.merge.has_begun and self.ends_at_begin is None:
            self.ends_at_begin = self.ends()

    def take(self, number: int, head: wire.Deliver, tail: bytes) -> None:
        self.shares.delivered(number, len(tail))
        accepted = self.merge.delivered(number, head, unpack_blocks(memoryview(tail)))
        if accepted is None:
            self.drop(number, len(tail))
            return
        self.report(accepted.gaps)
        for batch in accepted.batches:
            for message in batch:
                got = self.got[message.topic]
                gaps = self.gaps[message.topic]
                expected = max(got[-1] + 1, gaps[-1][1] if gaps else 0) if got else None
                if expected is not None and message.offset != expected:
                    raise Broken(f"{message.topic}: {message.offset} came where {expected} must")
                got.append(message.offset)
        self.arrived.append((number, len(tail)))

    def drop(self, number: int, size: int) -> None:
        """A delivery that does not count: its credit returns at once."""
        self.shares.consumed(number, size)
        self.send_credit(self.shares.due(), {})

    def report(self, gaps: Iterable[wire.GapState]) -> None:
        for gap in gaps:
            topic, first, end = gap.text.split()
            known = self.gaps[topic]
            got = self.got[topic]
            if (known and int(first) < known[-1][1]) or (got and int(first) <= got[-1]):
                raise Broken(f"gap {gap.text} was reported again, or after its messages")
            known.append((int(first), int(end)))

    def read(self) -> None:
        """The program reads what has arrived, or a part of it."""
        count = self.random.randint(0, len(self.arrived))
        for _ in range(count):
            number, size = self.arrived.popleft()
            self.shares.consumed(number, size)
        if count:
            self.send_credit(self.shares.due(), {})

    # --- The check ---

    def check_progress(self) -> None:
        bound = 2 * self.buffer_bytes + (self.parts + 1) * self.size_max
        if self.shares.held_bytes > bound:
            raise Broken(f"{self.shares.held_bytes} bytes are held")

    def check_end(self) -> None:
        assert self.ends_at_begin is not None
        for topic, end in self.ends().items():
            covered = {*self.got[topic]}
            for first, behind in self.gaps[topic]:
                covered.update(range(first, behind))
            if self.kind == "earliest":
                # What retention took before the reader began was never due to it.
                due = self.got[topic][0] if self.got[topic] else end
                if due > 1 and not self.retains:
                    raise Broken(f"{topic} began at {due}")
            else:
                due = self.ends_at_begin[topic]
                first = min(covered, default=end)
                lowest = self.ends_at_start[topic] - (1 if self.kind == "last" else 0)
                if first < max(1, lowest) and not self.was_unaware:
                    raise Broken(f"{topic}: {first} is older than the subscription")
            missing = sorted(set(range(due, end)) - covered)
            if missing:
                raise Broken(f"{topic}: {missing[:5]} are missing")


def run_history(seed: int) -> dict[str, list[int]]:
    world = World(seed)
    try:
        world.run()
    except Broken as broken:
        raise Broken(f"history {seed}: {broken}") from None
    return world.got
