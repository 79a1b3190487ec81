"""Terms of ownership begin and end, and wishes are noted and fulfilled."""

from __future__ import annotations

import asyncio

import pytest

from runnel.cluster.state import TERMS_KEPT_MAX, OwnershipTerm, ShardOwner
from runnel.errors import ClientFault, MovedError
from runnel.log.log import ShardId
from tests.cluster.contract.places import StatePlace, scenario, until

SHARD, OTHER = ShardId("main", 3), ShardId("a/b ü", 0)


@scenario
async def test_term_of_a_shard_that_was_never_served(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    assert SHARD not in first.view().owners
    assert list(await first.terms(SHARD)) == []
    await first.begin_term(SHARD, 7, 1)
    row = first.view().owners[SHARD]
    assert (row.owner, row.incarnation, row.epoch, row.wanted) == ("first", 1, 7, "")
    assert row.moved_ns == place.clock.time_ns()
    await until(lambda: second.view().owners == {SHARD: row})
    assert second.view().address(SHARD) == "first:7470"
    assert list(await second.terms(SHARD)) == [OwnershipTerm(SHARD, 7, "first", 1, 1)]


@scenario
async def test_ended_term_leaves_a_row_without_owner(place: StatePlace) -> None:
    first = await place.joined("first")
    await first.begin_term(SHARD, 7, 1)
    await first.end_term(SHARD, 7, 10)
    row = first.view().owners[SHARD]
    assert (row.owner, row.incarnation, row.epoch) == ("", 0, 7)
    assert not first.view().is_served(SHARD)
    assert list(await first.terms(SHARD)) == [OwnershipTerm(SHARD, 7, "first", 1, 1, 10)]


@scenario
async def test_shards_are_apart(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await first.begin_term(SHARD, 2, 1)
    await second.begin_term(OTHER, 3, 4)
    await until(lambda: len(first.view().owners) == 2)
    assert first.view().address(SHARD) == "first:7470"
    assert first.view().address(OTHER) == "second:7470"
    assert [term.epoch for term in await first.terms(OTHER)] == [3]


@scenario
async def test_term_that_its_owner_did_not_end_ends_where_the_next_begins(
    place: StatePlace,
) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await first.begin_term(SHARD, 1, 1)
    await second.declare_dead("first", 1)
    await second.begin_term(SHARD, 2, 20)
    await second.end_term(SHARD, 2, 25)
    await second.begin_term(SHARD, 3, 25)
    assert list(await second.terms(SHARD)) == [
        OwnershipTerm(SHARD, 1, "first", 1, 1, 20),
        OwnershipTerm(SHARD, 2, "second", 1, 20, 25),
        OwnershipTerm(SHARD, 3, "second", 1, 25, 0),
    ]


@scenario
async def test_lock_counts_for_more_than_a_row_that_names_a_living_node(place: StatePlace) -> None:
    """An owner may have lost its lock without having said so."""
    first, second = await place.joined("first"), await place.joined("second")
    await first.begin_term(SHARD, 1, 1)
    await second.begin_term(SHARD, 2, 9)
    assert second.view().owners[SHARD].owner == "second"
    await first.end_term(SHARD, 1, 9)  # too late, and no harm
    assert second.view().owners[SHARD].owner == "second"
    assert [term.next_entry for term in await second.terms(SHARD)] == [9, 0]


@scenario
async def test_without_a_lock_a_living_owner_keeps_its_shard(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await first.begin_term(SHARD, 1, 1, has_lock=False)
    with pytest.raises(MovedError):
        await second.begin_term(SHARD, 2, 1, has_lock=False)
    await first.end_term(SHARD, 1, 5)
    await second.begin_term(SHARD, 2, 1, has_lock=False)
    with pytest.raises(MovedError):
        await first.begin_term(SHARD, 3, 1, has_lock=False)
    await first.declare_dead("second", 1)
    await first.begin_term(SHARD, 3, 1, has_lock=False)
    assert first.view().address(SHARD) == "first:7470"


@scenario
async def test_without_a_lock_one_of_several_gets_the_shard(place: StatePlace) -> None:
    nodes = [await place.joined(f"node-{number}") for number in range(4)]
    outcomes = await asyncio.gather(
        *(node.begin_term(SHARD, 1, 1, has_lock=False) for node in nodes), return_exceptions=True
    )
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert len(refused) == 3
    assert all(isinstance(outcome, MovedError) for outcome in refused)
    winner = f"node-{outcomes.index(None)}"
    await until(lambda: all(node.view().owners[SHARD].owner == winner for node in nodes))


@scenario
async def test_epochs_only_rise(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await first.begin_term(SHARD, 5, 1)
    await first.end_term(SHARD, 5, 2)
    for node in (first, second):
        for epoch in (4, 5):
            with pytest.raises(MovedError, match="epoch 5"):
                await node.begin_term(SHARD, epoch, 2)
    await second.begin_term(SHARD, 6, 2)


@scenario
async def test_repeated_changes_do_nothing(place: StatePlace) -> None:
    """The answer to a change may be lost."""
    first = await place.joined("first")
    for _ in range(2):
        await first.begin_term(SHARD, 1, 1)
    terms = await first.terms(SHARD)
    version = first.view().version
    await first.begin_term(SHARD, 1, 1)
    assert await first.terms(SHARD) == terms
    assert first.view().version == version
    for _ in range(2):
        await first.end_term(SHARD, 1, 3)
    assert [term.next_entry for term in await first.terms(SHARD)] == [3]
    await first.end_term(OTHER, 1, 3)
    assert OTHER not in first.view().owners


@scenario
async def test_end_of_a_former_life_ends_nothing_of_the_next(place: StatePlace) -> None:
    await (await place.joined("first")).begin_term(SHARD, 1, 1)
    again = await place.joined("first")
    await again.end_term(SHARD, 1, 3)
    assert [term.next_entry for term in await again.terms(SHARD)] == [0]
    await again.begin_term(SHARD, 2, 4)
    assert [term.next_entry for term in await again.terms(SHARD)] == [4, 0]


@scenario
async def test_only_the_last_terms_are_kept(place: StatePlace) -> None:
    first = await place.joined("first")
    last = TERMS_KEPT_MAX + 3
    for epoch in range(1, last + 1):
        await first.begin_term(SHARD, epoch, epoch)
    epochs = [term.epoch for term in await first.terms(SHARD)]
    assert epochs == list(range(last - TERMS_KEPT_MAX + 1, last + 1))


# --- Wishes ---


@scenario
async def test_wish_is_seen_by_all_and_fulfilled_by_the_wanted_node(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await first.begin_term(SHARD, 1, 1)
    await second.want(SHARD, "second", "asked for by an operator")
    await until(lambda: first.view().owners[SHARD].wanted == "second")
    row = first.view().owners[SHARD]
    assert (row.owner, row.epoch, row.reason) == ("first", 1, "asked for by an operator")
    await first.end_term(SHARD, 1, 4)
    assert first.view().owners[SHARD].wanted == "second"
    await second.begin_term(SHARD, 2, 4)
    row = second.view().owners[SHARD]
    assert (row.owner, row.wanted, row.reason) == ("second", "", "")


@scenario
async def test_wish_outlives_a_term_of_another_node(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await first.want(SHARD, "second", "balance")
    await first.begin_term(SHARD, 1, 1)
    assert first.view().owners[SHARD].wanted == "second"
    await second.want(SHARD, "", "nothing happened for 10 s")
    row = second.view().owners[SHARD]
    assert (row.owner, row.wanted, row.reason) == ("first", "", "")


@scenario
async def test_wish_for_a_shard_that_was_never_served(place: StatePlace) -> None:
    first = await place.joined("first")
    await first.want(SHARD, "first", "why not")
    assert first.view().owners[SHARD] == ShardOwner(SHARD, wanted="first", reason="why not")


@scenario
async def test_wish_for_the_present_owner_is_none(place: StatePlace) -> None:
    first, second = await place.joined("first"), await place.joined("second")
    await first.begin_term(SHARD, 1, 1)
    await second.want(SHARD, "first", "stay")
    assert second.view().owners[SHARD].wanted == ""
    await second.declare_dead("first", 1)
    third = await place.joined("first")
    await third.want(SHARD, "first", "again")  # that was a former life
    assert third.view().owners[SHARD].wanted == "first"


@scenario
async def test_nobody_is_wanted_who_does_not_live(place: StatePlace) -> None:
    first = await place.joined("first")
    await (await place.joined("dead")).leave()
    for name in ("unknown", "dead"):
        with pytest.raises(ClientFault, match=name):
            await first.want(SHARD, name, "?")
    assert SHARD not in first.view().owners
