"""Which shards a node takes and gives up: views, requests and the time go in, actions come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.cluster.ownership import Action, Drop, GiveUp, Ownership, ShardPhase, Take
from runnel.cluster.planning import rendezvous
from runnel.cluster.state import ClusterView, Node, ShardOwner
from runnel.log.log import ShardId

MS = 1_000_000
SETTLE_NS = 500 * MS


def owned_by(*nodes: str) -> ShardId:
    """A shard that rendezvous hashing gives to the first of these nodes."""
    numbers = (ShardId("main", number) for number in range(1000))
    return next(shard for shard in numbers if rendezvous(shard, nodes) == nodes[0])


class At:
    """A node `a`, and the view that it is shown."""

    def __init__(self, others: str = "b", settle_ns: int = 0) -> None:
        self.now_ns = 0
        self._version = 0
        self.nodes = {name: Node(name, 1, name) for name in ("a", *others)}
        self.rows: dict[ShardId, ShardOwner] = {}
        self.machine = Ownership("a", settle_ns)
        self.machine.joined(self.nodes["a"], self.view(), 0)

    def view(self) -> ClusterView:
        self._version += 1
        return ClusterView(self._version, dict(self.nodes), dict(self.rows))

    def row(self, shard: ShardId, owner: str = "", **values: Any) -> None:
        incarnation = self.nodes[owner].incarnation if owner else 0
        self.rows[shard] = ShardOwner(shard, owner, incarnation, **values)

    def show(self) -> Sequence[Action]:
        self.machine.seen(self.view(), self.now_ns)
        return self.decide()

    def decide(self) -> Sequence[Action]:
        return list(self.machine.decide(self.now_ns))

    def change(self, name: str, **values: Any) -> None:
        self.nodes[name] = msgspec.structs.replace(self.nodes[name], **values)

    def own(self, shard: ShardId, epoch: int = 1) -> None:
        """Node `a` serves the shard."""
        self.machine.asked_for(shard)
        self.row(shard, wanted="a")
        [take] = self.show()
        assert take == Take(shard, 0)
        self.machine.taken(shard)
        self.row(shard, "a", epoch=epoch)
        assert self.show() == []


MINE, THEIRS = owned_by("a", "b"), owned_by("b", "a")


# --- Taking ---


def test_heir_takes_a_shard_that_nobody_owns_above_its_last_epoch() -> None:
    at = At()
    at.row(MINE, epoch=7)
    at.row(THEIRS, epoch=3)
    assert at.show() == [Take(MINE, 7)]
    assert at.machine.phase(MINE) is ShardPhase.LOADING
    assert at.decide() == []
    at.machine.taken(MINE)
    assert at.machine.phase(MINE) is ShardPhase.OWNED


def test_nobody_takes_a_shard_from_a_node_that_lives() -> None:
    at = At()
    at.row(MINE, "b", epoch=7)
    assert at.show() == []
    at.change("b", is_alive=False)
    assert at.show() == [Take(MINE, 7)]


def test_row_of_a_former_life_does_not_count() -> None:
    at = At()
    at.row(MINE, "b", epoch=7)
    at.show()
    at.change("b", incarnation=2)
    assert at.show() == [Take(MINE, 7)]


def test_wish_decides_over_hashing_if_its_node_lives() -> None:
    at = At()
    at.row(THEIRS, wanted="a")
    at.row(MINE, wanted="b")
    assert at.show() == [Take(THEIRS, 0)]
    at.change("b", is_alive=False)
    assert at.show() == [Take(MINE, 0)]


def test_draining_node_takes_nothing_while_another_may() -> None:
    at = At()
    at.change("a", is_draining=True)
    at.row(MINE)
    assert at.show() == []
    at.change("b", is_draining=True)
    assert at.show() == [Take(MINE, 0)]


def test_refused_shard_is_tried_again_later_and_later() -> None:
    at = At()
    at.row(MINE)
    assert at.show() == [Take(MINE, 0)]
    waits = []
    for _ in range(12):
        at.machine.refused(MINE, at.now_ns)
        assert at.decide() == []
        due_ns = at.machine.due_ns(at.now_ns)
        assert due_ns is not None
        waits.append(due_ns - at.now_ns)
        at.now_ns = due_ns
        assert at.decide() == [Take(MINE, 0)]
    assert waits[0] == 2 * MS
    assert waits[-1] == 1000 * MS
    assert waits == sorted(waits)


def test_term_of_this_life_that_is_not_served_is_taken_up_again() -> None:
    """Its end, or its beginning, was recorded and the answer lost: nobody else may take it."""
    at = At()
    at.row(THEIRS, "a", epoch=4)
    assert at.show() == [Take(THEIRS, 4)]


def test_nodes_that_start_together_share_the_shards() -> None:
    at = At(others="", settle_ns=SETTLE_NS)
    at.row(THEIRS)
    assert at.show() == []
    assert at.machine.due_ns(at.now_ns) == SETTLE_NS
    at.now_ns = SETTLE_NS - 1
    at.nodes["b"] = Node("b", 1, "b")
    assert at.show() == []
    at.now_ns += SETTLE_NS
    assert at.decide() == []  # it is the other one's now


def test_nobody_waits_for_a_shard_that_was_served_or_that_a_client_asks_for() -> None:
    at = At(settle_ns=SETTLE_NS)
    at.row(MINE, "b", epoch=1)
    at.show()
    at.row(MINE, epoch=1)
    assert at.show() == [Take(MINE, 1)]
    other = next(
        shard for shard in (ShardId("other", n) for n in range(99)) if at.machine.heir(shard) == "a"
    )
    assert at.machine.is_coming(other)
    at.machine.asked_for(other)
    assert at.decide() == [Take(other, 0)]


# --- Giving up ---


@pytest.mark.parametrize("node", ["b", "c"])
def test_owner_gives_up_for_a_wish(node: str) -> None:
    at = At(others="bc")
    at.own(MINE)
    at.row(MINE, "a", epoch=1, wanted=node, reason="a test")
    assert at.show() == [GiveUp(MINE, f"{node} should have it: a test")]
    assert at.machine.phase(MINE) is ShardPhase.ENDING
    assert at.machine.owner(MINE) == ""
    assert at.decide() == []
    at.row(MINE, epoch=1, wanted=node)
    at.machine.given_up(MINE)
    assert at.show() == []
    assert at.machine.heir(MINE) == node


def test_wish_for_a_dead_node_is_not_heard() -> None:
    at = At()
    at.own(MINE)
    at.change("b", is_alive=False)
    at.row(MINE, "a", epoch=1, wanted="b")
    assert at.show() == []


def test_draining_node_gives_up_everything_unless_nobody_else_lives() -> None:
    at = At()
    at.own(MINE)
    at.change("a", is_draining=True)
    at.change("b", is_alive=False)
    assert at.show() == []
    at.change("b", is_alive=True)
    assert at.show() == [GiveUp(MINE, "the node drains")]


def test_stopping_node_gives_up_everything_and_takes_nothing() -> None:
    at = At()
    at.own(THEIRS)
    at.machine.stopping()
    at.row(MINE)
    assert at.show() == [GiveUp(THEIRS, "the node stops")]
    assert not at.machine.is_coming(MINE)


@pytest.mark.parametrize("values", [{"is_alive": False}, {"incarnation": 2}])
def test_fenced_node_drops_everything(values: Mapping[str, object]) -> None:
    at = At()
    at.own(MINE)
    at.change("a", **values)
    assert at.show() == [Drop(MINE)]
    assert at.machine.is_gone
    at.row(THEIRS, wanted="a")
    assert at.show() == []
    assert at.machine.phase(MINE) is ShardPhase.GONE


# --- What clients are told ---


def test_request_waits_for_what_is_coming_and_for_nothing_else() -> None:
    at = At()
    assert at.machine.is_coming(MINE)
    assert not at.machine.is_coming(THEIRS)
    at.row(THEIRS, "b", epoch=1)
    at.show()
    assert not at.machine.is_coming(THEIRS)
    at.row(THEIRS, "b", epoch=1, wanted="a")
    at.show()
    assert at.machine.is_coming(THEIRS)  # its owner gives it up
    at.own(MINE)
    assert not at.machine.is_coming(MINE)  # it is here


# --- Any order ---

EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("row"),
            st.integers(0, 3),
            st.sampled_from(["", "a", "b"]),
            st.sampled_from(["", "a", "b"]),
        ),
        st.tuples(st.just("alive"), st.booleans()),
        st.tuples(st.just("drain"), st.booleans()),
        st.tuples(st.just("ask"), st.integers(0, 3)),
        st.tuples(st.just("done"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("time"), st.integers(0, 3000)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_each_action_is_of_a_shard_that_is_free_for_it(events: list[tuple[object, ...]]) -> None:
    """Whatever happens: nothing is taken twice, from a living node, or given up without being owned."""
    at = At(settle_ns=SETTLE_NS)
    under_way: dict[ShardId, Action] = {}
    owned: set[ShardId] = set()
    for event in events:
        match event:
            case ("row", int(number), str(owner), str(wanted)):
                at.row(ShardId("main", number), owner, epoch=1, wanted=wanted)
                actions = at.show()
            case ("alive", bool(is_alive)):
                at.change("b", is_alive=is_alive)
                actions = at.show()
            case ("drain", bool(is_draining)):
                at.change("a", is_draining=is_draining)
                actions = at.show()
            case ("ask", int(number)):
                at.machine.asked_for(ShardId("main", number))
                actions = at.decide()
            case ("done", int(number), bool(is_good)):
                shard = ShardId("main", number)
                match under_way.pop(shard, None):
                    case Take() if is_good:
                        owned.add(shard)
                        at.machine.taken(shard)
                    case Take():
                        at.machine.refused(shard, at.now_ns)
                    case GiveUp():
                        owned.discard(shard)
                        at.machine.given_up(shard)
                actions = at.decide()
            case ("time", int(ms)):
                at.now_ns += ms * MS
                actions = at.decide()
            case _:
                raise AssertionError(event)
        for action in actions:
            assert action.shard not in under_way
            under_way[action.shard] = action
            if isinstance(action, Take):
                assert action.shard not in owned
                assert at.machine.view.address(action.shard) in (None, "a")
            else:
                assert isinstance(action, GiveUp)
                assert action.shard in owned
