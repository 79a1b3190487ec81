"""Nodes join, leave, are declared dead, drain and report their load."""

from __future__ import annotations

import pytest

from runnel.cluster.state import ClusterView, Node, NodeLoad
from runnel.errors import ClientFault, ClosedError, FencedError
from runnel.log.log import ShardId
from tests.cluster.contract.places import StatePlace, scenario, until

SHARD = ShardId("main", 3)


@scenario
async def test_every_node_sees_who_joined(place: StatePlace) -> None:
    first = await place.state("first")
    second = await place.state("second")
    node = await first.join("one:7470")
    assert node == Node("first", 1, "one:7470")
    assert first.view().nodes == {"first": node}  # at once, at the node itself
    await until(lambda: second.view().nodes == {"first": node})
    late = await place.state("late")
    assert late.view().nodes == {"first": node}


@scenario
async def test_each_life_has_a_higher_incarnation(place: StatePlace) -> None:
    first = await place.state("first")
    incarnations = [(await first.join("a")).incarnation]
    await first.leave()
    incarnations.append((await first.join("b")).incarnation)
    other = await place.state("first")
    incarnations.append((await other.join("c")).incarnation)
    await other.declare_dead("first", incarnations[-1])
    incarnations.append((await (await place.state("first")).join("d")).incarnation)
    assert incarnations == sorted(set(incarnations))


@scenario
async def test_node_that_left_lives_no_more(place: StatePlace) -> None:
    first = await place.joined("first")
    await first.leave()
    assert not first.view().nodes["first"].is_alive
    with pytest.raises(FencedError):
        await first.begin_term(SHARD, 1, 1)


@scenario
async def test_former_life_is_fenced_by_the_next_one(place: StatePlace) -> None:
    former = await place.joined("first")
    await former.begin_term(SHARD, 1, 1)
    later = await place.joined("first")
    for change in (
        former.begin_term(ShardId("other"), 1, 1),
        former.end_term(SHARD, 1, 5),
        former.report_load(NodeLoad("first", 0.0, {})),
        former.want(SHARD, "first", "?"),
        former.set_draining("first", is_draining=True),
        former.declare_dead("first", 2),
        former.leave(),
    ):
        with pytest.raises(FencedError):
            await change
    assert later.view().nodes["first"].is_alive
    assert later.view().owners[SHARD].owner == "first"
    assert not later.view().is_served(SHARD)


@scenario
async def test_node_declared_dead_is_fenced_and_serves_nothing(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await first.begin_term(SHARD, 1, 1)
    await until(lambda: second.view().address(SHARD) == "first:7470")
    await second.declare_dead("first", 1)
    assert second.view().address(SHARD) is None
    await until(lambda: not first.view().nodes["first"].is_alive)
    with pytest.raises(FencedError):
        await first.end_term(SHARD, 1, 7)


@scenario
async def test_only_the_named_life_is_declared_dead(place: StatePlace) -> None:
    await place.joined("first")
    again = await place.joined("first")
    parent = await place.state("")
    await parent.declare_dead("first", 1)  # it has died already
    await parent.declare_dead("unknown", 1)
    await again.report_load(NodeLoad("first", 0.0, {}))
    await parent.declare_dead("first", 2)
    with pytest.raises(FencedError):
        await again.report_load(NodeLoad("first", 0.0, {}))


@scenario
async def test_who_has_not_joined_watches_and_wishes_but_owns_nothing(place: StatePlace) -> None:
    await place.joined("first")
    parent = await place.state("parent")
    await parent.want(SHARD, "first", "asked for")
    await parent.set_draining("first", is_draining=True)
    for change in (
        parent.begin_term(SHARD, 1, 1),
        parent.end_term(SHARD, 1, 1),
        parent.report_load(NodeLoad("parent", 0.0, {})),
        parent.leave(),
    ):
        with pytest.raises(FencedError):
            await change
    assert "parent" not in parent.view().nodes


@scenario
async def test_draining_ends_with_a_new_life(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await second.set_draining("first", is_draining=True)
    await until(lambda: first.view().nodes["first"].is_draining)
    await first.set_draining("first", is_draining=False)
    await until(lambda: not second.view().nodes["first"].is_draining)
    await second.set_draining("first", is_draining=True)
    await first.join("again")
    assert not first.view().nodes["first"].is_draining


@scenario
async def test_unknown_and_dead_nodes_cannot_drain(place: StatePlace) -> None:
    first = await place.joined("first")
    dead = await place.joined("dead")
    await dead.leave()
    for name in ("unknown", "dead"):
        with pytest.raises(ClientFault, match=name):
            await first.set_draining(name, is_draining=True)


@scenario
async def test_loads_are_the_newest_of_living_nodes(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await first.report_load(NodeLoad("first", 9.0, {}))
    newest = NodeLoad("first", 1.5, {str(SHARD): 1e6})
    await first.report_load(newest)
    of_second = NodeLoad("second", 0.5, {})
    await second.report_load(of_second)
    parent = await place.state("")
    assert list(await parent.loads()) == [newest, of_second]
    await parent.declare_dead("second", 1)
    assert list(await parent.loads()) == [newest]


@scenario
async def test_load_of_a_former_life_is_forgotten(place: StatePlace) -> None:
    first = await place.joined("first")
    await first.report_load(NodeLoad("first", 1.0, {}))
    again = await place.joined("first")
    assert list(await again.loads()) == []


@scenario
async def test_watchers_hear_every_change_in_order(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    heard: list[ClusterView] = []
    for state in (first, second):
        state.watch(heard.append)
    for epoch in range(1, 6):
        state = (first, second)[epoch % 2]
        await state.begin_term(SHARD, epoch, epoch)
        await state.end_term(SHARD, epoch, epoch + 1)
    await until(lambda: first.view().version == second.view().version)
    versions = [view.version for view in heard]
    assert max(versions) == first.view().version
    of_each = {id(view): view for view in heard}
    assert first.view() == second.view() == heard[-1]
    assert len(of_each) >= 5
    epochs = [view.owners[SHARD].epoch for view in heard if SHARD in view.owners]
    assert epochs[-1] == 5


@scenario
async def test_closed_access_hears_and_changes_nothing(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    heard: list[ClusterView] = []
    first.watch(heard.append)
    await first.close()
    await second.begin_term(SHARD, 1, 1)
    with pytest.raises(ClosedError):
        await first.want(SHARD, "second", "?")
    assert heard == []
    assert second.view().nodes["first"].is_alive  # to close is not to leave
