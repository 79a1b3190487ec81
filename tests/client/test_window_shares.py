"""The window of a consumer, divided among nodes that answer late: never exceeded, and no node starves."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

import pytest

from runnel.client.consumer.window_shares import WindowShares

_BYTES: Final = 2**30  # so that only messages count
_STEPS: Final = 400


class Node:
    """A node: it delivers what it owes, as far as its window lets it. Frames take their time in both directions."""

    def __init__(self, owed: int) -> None:
        self.owed = owed
        self.window = 0
        self.leased = 0
        self.is_wanting = False
        self.to_node: deque[int | str] = deque()  # windows, acks ("ack"), pings ("ping")
        self.to_client: deque[str] = deque()  # "work", "pong", "wants", "sated"

    def act(self) -> None:
        while self.owed and self.leased < self.window:
            self.owed -= 1
            self.leased += 1
            self.to_client.append("work")
        if (self.owed > 0) != self.is_wanting:
            self.is_wanting = self.owed > 0
            self.to_client.append("wants" if self.is_wanting else "sated")


class Consumer:
    """The consumer's end of it."""

    def __init__(
        self, window: int, owed: list[int], random: Random, size_bytes: int = _BYTES
    ) -> None:
        self.window = window
        self.random = random
        self.shares: WindowShares[int] = WindowShares(window, size_bytes)
        self.nodes = [Node(count) for count in owed]
        self.has = [0] * len(owed)
        self.served = [0] * len(owed)
        for number in range(len(owed)):
            self.shares.add(number)
            self.nodes[number].act()
        self.divide()

    def divide(self) -> None:
        while changes := self.shares.changes():
            for change in changes:
                self.nodes[change.part].to_node.append(change.messages)
                if change.needs_confirmation:
                    self.nodes[change.part].to_node.append("ping")

    def step(self) -> None:
        number = self.random.randrange(len(self.nodes))
        node = self.nodes[number]
        match self.random.randrange(3):
            case 0 if node.to_node:
                match node.to_node.popleft():
                    case "ack":
                        node.leased -= 1
                    case "ping":
                        node.to_client.append("pong")
                    case int(window):
                        node.window = window
                node.act()
            case 1 if node.to_client:
                self.take(number, node.to_client.popleft())
            case 2 if self.has[number]:
                self.has[number] -= 1
                self.served[number] += 1
                node.to_node.append("ack")
                self.shares.uses(number, self.has[number])
                if self.shares.is_contended:
                    self.divide()
        assert sum(self.has) <= self.window

    def take(self, number: int, frame: str) -> None:
        match frame:
            case "work":
                self.has[number] += 1
                self.shares.uses(number, self.has[number])
                return
            case "pong":
                self.shares.confirmed(number)
            case _:
                self.shares.wants(number, is_wanting=frame == "wants")
        self.divide()


@pytest.mark.parametrize("seed", range(200))
def test_the_window_is_never_exceeded_and_everything_comes(seed: int) -> None:
    random = Random(seed)
    owed = [random.choice([0, 3, 40]) for _ in range(random.randint(1, 5))]
    consumer = Consumer(random.choice([1, 2, 3, 10, 100]), owed, random)
    for _ in range(_STEPS * (sum(owed) + 10)):
        consumer.step()
        if consumer.served == owed:
            return
        if random.random() < 0.001:  # more comes meanwhile
            number = random.randrange(len(owed))
            owed[number] += 1
            consumer.nodes[number].owed += 1
            consumer.nodes[number].act()
    pytest.fail(f"{consumer.served} of {owed} within a window of {consumer.window}")


def test_the_busy_node_gets_the_window_except_for_a_reserve() -> None:
    consumer = Consumer(120, [10_000, 0, 0], Random(1))
    for _ in range(5_000):
        consumer.step()
    assert consumer.shares.share(0)[0] >= 100
    assert 0 < consumer.shares.share(1)[0] <= 10


def test_busy_nodes_share_evenly() -> None:
    consumer = Consumer(100, [5_000, 5_000, 0], Random(2))
    for _ in range(8_000):
        consumer.step()
    first, second = consumer.served[:2]
    assert abs(first - second) < 0.3 * max(first, second)


def test_a_window_of_one_message_goes_from_node_to_node() -> None:
    consumer = Consumer(1, [50, 50, 50], Random(3))
    while sum(consumer.served) < 60:
        consumer.step()
    assert min(consumer.served) >= 15


def test_a_small_window_of_bytes_is_not_divided() -> None:
    """A node that has leased nothing may lease one message of any size: so one node at a time may lease."""
    consumer = Consumer(100, [20, 20, 20], Random(4), size_bytes=1)
    while sum(consumer.served) < 60:
        busy = [
            number
            for number, node in enumerate(consumer.nodes)
            if node.leased - node.to_node.count("ack")
        ]
        assert len(busy) <= 1
        consumer.step()


def test_what_moves_with_its_shard_stays_in_the_window() -> None:
    shares: WindowShares[str] = WindowShares(4, _BYTES)
    for name in "ab":
        shares.add(name)
    assert [(change.part, change.messages) for change in shares.changes()] == [("a", 2), ("b", 2)]
    shares.uses("a", 2)
    shares.uses("a", 0)
    shares.passed_on("a", 2)
    shares.moving = 2
    assert shares.changes() == []
    shares.moving = 0
    shares.uses("b", 2)  # they have come there
    [change] = shares.changes()
    assert (change.part, change.messages) == ("a", 2)


def test_window_may_become_nothing_and_grow_again_once_all_have_confirmed() -> None:
    shares: WindowShares[str] = WindowShares(9, _BYTES)
    for part in "abc":
        shares.add(part)
    assert [change.messages for change in shares.changes()] == [3, 3, 3]
    shares.resize(0, 0)
    changes = shares.changes()
    assert [(each.messages, each.size_bytes) for each in changes] == [(0, 0)] * 3
    assert all(each.needs_confirmation for each in changes)
    shares.resize(6, _BYTES)
    assert shares.changes() == []  # each node may still have leased what it had
    for part in "abc":
        shares.confirmed(part)
    assert [(each.part, each.messages) for each in shares.changes()] == [
        ("a", 2),
        ("b", 2),
        ("c", 2),
    ]


def test_smaller_window_gives_no_part_more_bytes_than_it_has() -> None:
    shares: WindowShares[str] = WindowShares(10, 10 * 2**20)
    for part in "ab":
        shares.add(part)
    assert len(shares.changes()) == 2
    shares.resize(4, 4 * 2**20)
    assert shares.share("a") == (5, 4 * 2**20)  # until `changes` has taken messages away
    assert [each.messages for each in shares.changes()] == [2, 2]
    assert shares.share("a") == (2, 2 * 2**20)
