"""Who should have which shard: rendezvous, balancing by load, and wishes that stay open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runnel.cluster import planning
from runnel.cluster.planning import QUIET_NS, REST_NS, WISH_NS_MAX, Wish, Wishes, plan, rendezvous
from runnel.cluster.state import ClusterView, Node, NodeLoad, ShardOwner
from runnel.log.log import ShardId

NOW_NS = 10_000 * 1_000_000_000
MB = 1_000_000.0
NODES = ("a", "b", "c", "d")


def shard(number: int) -> ShardId:
    return ShardId("main", number)


def view_of(
    owners: Mapping[int, str],
    *,
    nodes: str = "abc",
    dead: str = "",
    draining: str = "",
    moved_ns: Mapping[int, int] | None = None,
) -> ClusterView:
    rows = {
        shard(number): ShardOwner(
            shard(number), owner, 1, epoch=1, moved_ns=(moved_ns or {}).get(number, 0)
        )
        for number, owner in owners.items()
    }
    known = {
        name: Node(name, 1, name, is_alive=name not in dead, is_draining=name in draining)
        for name in nodes
    }
    return ClusterView(1, known, rows)


def loads_of(view: ClusterView, by_shard: Mapping[int, float]) -> list[NodeLoad]:
    return [
        NodeLoad(
            name,
            0.0,
            {
                str(shard(number)): load
                for number, load in by_shard.items()
                if view.owners[shard(number)].owner == name
            },
        )
        for name, node in view.nodes.items()
        if node.is_alive
    ]


def planned(view: ClusterView, by_shard: Mapping[int, float], now_ns: int = NOW_NS) -> list[Wish]:
    return plan(view, loads_of(view, by_shard), now_ns)


# --- Rendezvous ---


def test_shards_spread_over_the_nodes() -> None:
    counts = Counter(rendezvous(shard(number), NODES) for number in range(400))
    assert set(counts) == set(NODES)
    assert min(counts.values()) > 60


@given(st.integers(0, 1000), st.sets(st.sampled_from(NODES), min_size=2))
def test_only_the_shards_of_a_lost_node_get_another_one(number: int, nodes: set[str]) -> None:
    before = rendezvous(shard(number), nodes)
    assert before in nodes
    lost = min(nodes)
    after = rendezvous(shard(number), nodes - {lost})
    assert after == before if before != lost else after != lost


def test_nobody_takes_a_shard_where_nobody_lives() -> None:
    assert rendezvous(shard(1), ()) == ""


# --- Balancing ---


def test_nearest_shard_to_half_of_the_difference_moves_from_the_fullest_to_the_emptiest() -> None:
    view = view_of({0: "a", 1: "a", 2: "a", 3: "b", 4: "c"})
    by_shard = {0: 60 * MB, 1: 30 * MB, 2: 10 * MB, 3: 50 * MB, 4: 40 * MB}
    [wish] = planned(view, by_shard)
    assert (wish.shard, wish.node) == (shard(1), "c")
    assert wish.reason == "a has 100000000 bytes/s, c 40000000"


def test_nothing_moves_for_less_than_15_percent() -> None:
    view = view_of({0: "a", 1: "a", 2: "b"}, nodes="ab")
    assert planned(view, {0: 86 * MB, 1: 14 * MB, 2: 80 * MB}) == []
    assert planned(view, {0: 85 * MB, 1: 15 * MB, 2: 70 * MB})  # 100 falls to 85
    assert planned(view, {0: 86 * MB, 1: 14 * MB, 2: 70 * MB}) == []


def test_one_heavy_shard_is_not_passed_around() -> None:
    view = view_of({0: "a", 1: "b"}, nodes="ab")
    assert planned(view, {0: 100 * MB, 1: 1 * MB}) == []


def test_each_node_takes_part_in_one_move() -> None:
    view = view_of({0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "d"}, nodes="abcd")
    wishes = planned(view, {0: 50 * MB, 1: 50 * MB, 2: 40 * MB, 3: 40 * MB, 4: 2 * MB, 5: 1 * MB})
    assert [(wish.shard.shard, wish.node) for wish in wishes] == [(0, "d"), (2, "c")]


def test_shard_rests_and_the_cluster_has_to_be_quiet() -> None:
    owners = {0: "a", 1: "a", 2: "b"}
    by_shard = {0: 50 * MB, 1: 50 * MB, 2: 1 * MB}

    def moved(number: int, ago_ns: int) -> list[Wish]:
        return planned(view_of(owners, nodes="ab", moved_ns={number: NOW_NS - ago_ns}), by_shard)

    assert moved(2, QUIET_NS - 1) == []
    assert [wish.shard.shard for wish in moved(2, QUIET_NS)] == [0]
    assert [wish.shard.shard for wish in moved(0, REST_NS - 1)] == [1]
    assert [wish.shard.shard for wish in moved(0, REST_NS)] == [0]
    assert [wish.shard.shard for wish in moved(0, -1)] == [0]  # the clock was set back


def test_nothing_is_planned_while_a_wish_is_open_or_a_load_unknown() -> None:
    view = view_of({0: "a", 1: "a", 2: "b"}, nodes="ab")
    by_shard = {0: 50 * MB, 1: 50 * MB, 2: 1 * MB}
    loads = loads_of(view, by_shard)
    assert plan(view, loads, NOW_NS)
    assert plan(view, loads[:1], NOW_NS) == []
    wished = msgspec.structs.replace(view.owners[shard(2)], wanted="a")
    view = msgspec.structs.replace(view, owners={**view.owners, shard(2): wished})
    assert plan(view, loads, NOW_NS) == []


def test_draining_node_is_the_fullest_and_nobody_waits() -> None:
    moved = dict.fromkeys(range(4), NOW_NS - 1)
    view = view_of({0: "a", 1: "a", 2: "b", 3: "c"}, draining="a", moved_ns=moved)
    [wish] = planned(view, {0: 1 * MB, 1: 2 * MB, 2: 900 * MB, 3: 800 * MB})
    assert wish == Wish(shard(1), "c", "a drains")


def test_nothing_moves_to_a_node_that_drains_or_is_dead() -> None:
    by_shard = {0: 50 * MB, 1: 50 * MB}
    view = view_of({0: "a", 1: "a"}, nodes="ab", draining="b")
    assert planned(view, by_shard) == []
    view = view_of({0: "a", 1: "a"}, nodes="ab", dead="b")
    assert planned(view, by_shard) == []
    view = view_of({0: "a", 1: "a"}, nodes="ab", draining="ab")
    assert planned(view, by_shard) == []


def test_shard_without_load_goes_where_hashing_puts_it() -> None:
    strays = {number: rendezvous(shard(number), "ab") for number in range(20)}
    view = view_of(dict.fromkeys(strays, "a"), nodes="ab")
    [wish] = planned(view, {3: planning.IDLE_BYTES_PER_S - 1})
    assert wish.node == "b" == strays[wish.shard.shard]


LOADS = st.dictionaries(
    st.integers(0, 15), st.one_of(st.just(0.0), st.floats(0, 100 * MB)), min_size=1
)


@given(LOADS, st.data())
def test_rounds_come_to_an_end_and_no_round_makes_the_fullest_fuller(
    by_shard: dict[int, float], data: st.DataObject
) -> None:
    names = "abcd"
    owners = {number: data.draw(st.sampled_from(names)) for number in by_shard}
    draining = data.draw(st.sets(st.sampled_from(names), max_size=3))
    seen: set[tuple[tuple[int, str], ...]] = set()
    for _ in range(200):
        view = view_of(owners, nodes=names, draining="".join(draining))
        wishes = planned(view, by_shard)
        parties = [owners[wish.shard.shard] for wish in wishes] + [wish.node for wish in wishes]
        assert len(parties) == len(set(parties))
        for wish in wishes:
            source = owners[wish.shard.shard]
            before = _total(owners, by_shard, source), _total(owners, by_shard, wish.node)
            owners[wish.shard.shard] = wish.node
            after = _total(owners, by_shard, source), _total(owners, by_shard, wish.node)
            assert wish.node not in draining
            if source not in draining and by_shard[wish.shard.shard] >= planning.IDLE_BYTES_PER_S:
                assert max(after) <= 0.85 * max(before) + 1e-6
        if not wishes:
            break
        placed = tuple(sorted(owners.items()))
        assert placed not in seen, "shards are moved in circles"
        seen.add(placed)
    else:
        pytest.fail("the rounds do not end")
    if draining != set(names):
        assert not draining & set(owners.values())


def _total(owners: Mapping[int, str], by_shard: Mapping[int, float], node: str) -> float:
    return sum(
        load
        for number, load in by_shard.items()
        if owners[number] == node and load >= planning.IDLE_BYTES_PER_S
    )


# --- Planners and wishes ---


def test_the_living_node_whose_name_comes_first_plans() -> None:
    view = view_of({}, nodes="abc", dead="a")
    assert [name for name in "abc" if planning.is_planner(view, name)] == ["b"]


def test_wish_that_nobody_fulfils_is_taken_back() -> None:
    view = view_of({0: "a", 1: "a"}, nodes="ab")
    row = msgspec.structs.replace(view.owners[shard(0)], wanted="b")
    wished = msgspec.structs.replace(view, owners={**view.owners, shard(0): row})
    wishes = Wishes()
    assert wishes.overdue(wished, 0) == []
    assert wishes.overdue(wished, WISH_NS_MAX - 1) == []
    [back] = wishes.overdue(wished, WISH_NS_MAX)
    assert (back.shard, back.node) == (shard(0), "")
    assert wishes.overdue(view, WISH_NS_MAX + 1) == []
    assert wishes.overdue(wished, WISH_NS_MAX + 2) == []  # another wish


@pytest.mark.parametrize(
    ("now", "is_news"),
    [({"main/0": 105 * MB}, False), ({"main/0": 120 * MB}, True), ({}, True)],
)
def test_load_is_reported_when_it_has_changed(now: dict[str, float], is_news: bool) -> None:
    assert (
        planning.is_news(NodeLoad("a", 0, {"main/0": 100 * MB}), NodeLoad("a", 9, now)) == is_news
    )


def test_trickle_is_no_news() -> None:
    assert not planning.is_news(NodeLoad("a", 0, {}), NodeLoad("a", 0, {"main/0": 1000.0}))
