"""Named publishers: what comes next, what is a repetition, what is refused."""

from __future__ import annotations

import asyncio

import pytest

from runnel.config import LimitSettings, LogSettings, Retain, Rotate, TopicRule
from runnel.config.settings import DAY_NS
from runnel.errors import (
    InvalidNameError,
    ProducerFault,
    ProducerFencedError,
    ProducerForgottenError,
)
from runnel.log.log import Level
from tests.log.contract.stores import At, Store, scenario
from tests.log.samples import batch, numbered, one, read_payloads, trim_log


@scenario()
async def test_next_number_of_the_current_term_is_accepted(at: At) -> None:
    for number in range(5):
        done = await at.log.append(numbered("p", number, payload=b"%d" % number))
        assert not done.is_repeated
        assert done.base_offsets == [number + 1]
    assert read_payloads(await at.log.read("a", 0, 1)) == [b"0", b"1", b"2", b"3", b"4"]


@scenario()
async def test_named_publishers_get_the_strongest_level_whatever_they_ask_for(at: At) -> None:
    future = at.log.append(numbered("p", 0), Level.NONE)
    assert future.done() == (at.store is Store.MEMORY)
    assert (await future).level is at.best_level


@scenario()
async def test_repeated_batch_is_answered_with_its_original_offsets(at: At) -> None:
    await at.log.append(one("a", b"before", b"it"))
    first = await at.log.append(numbered("p", 0))
    await at.log.append(numbered("p", 1))
    await at.log.append(one("a", b"behind"))
    at.clock.advance(10**9)
    again = await at.log.append(numbered("p", 0))
    assert again.is_repeated
    assert list(again.base_offsets) == [3]
    assert (again.entry, again.epoch) == (first.entry, first.epoch)
    assert again.receive_time_ns == first.receive_time_ns
    assert again.level is at.best_level
    assert len(read_payloads(await at.log.read("a", 0, 1))) == 5


@scenario()
async def test_batch_repeated_while_the_first_is_under_way_is_stored_once(at: At) -> None:
    sent = batch(("a", [b"1", b"2"]), ("b", [b"3"]), producer="p", term=0, number=0)
    answers = await asyncio.gather(*(at.log.append(sent) for _ in range(5)))
    assert [answer.is_repeated for answer in answers] == [False, True, True, True, True]
    assert {tuple(answer.base_offsets) for answer in answers} == {(1, 1)}
    assert {answer.entry for answer in answers} == {1}
    assert read_payloads(await at.log.read("a", 0, 1)) == [b"1", b"2"]


@scenario()
async def test_gap_is_refused_and_changes_nothing(at: At) -> None:
    await at.log.append(numbered("p", 0))
    with pytest.raises(ProducerFault, match="number 1 of term 0 is missing before 2"):
        at.log.append(numbered("p", 2))
    assert (await at.log.append(numbered("p", 1))).base_offsets == [2]


@scenario()
async def test_higher_term_fences_the_one_before(at: At) -> None:
    await at.log.append(numbered("p", 0, term=1))
    with pytest.raises(ProducerFault, match="must begin term 2 with number 0, not 1"):
        at.log.append(numbered("p", 1, term=2))
    assert not (await at.log.append(numbered("p", 0, term=5))).is_repeated
    with pytest.raises(ProducerFencedError, match="term 5; term 1 may not publish"):
        at.log.append(numbered("p", 1, term=1))
    assert not (await at.log.append(numbered("p", 1, term=5))).is_repeated


@scenario()
async def test_unknown_publisher_begins_with_number_0(at: At) -> None:
    with pytest.raises(ProducerForgottenError, match="'p' is not known here"):
        at.log.append(numbered("p", 3))
    assert not (await at.log.append(numbered("p", 0))).is_repeated


@scenario(limits=LimitSettings(producers_max=2))
async def test_least_recently_used_publisher_is_forgotten_for_a_new_one(at: At) -> None:
    for name in ("p", "q", "r"):
        await at.log.append(numbered(name, 0))
    with pytest.raises(ProducerForgottenError):
        at.log.append(numbered("p", 1))
    assert not (await at.log.append(numbered("q", 1))).is_repeated


@scenario(log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0, producer_age_max_ns=DAY_NS))
async def test_publisher_is_forgotten_some_time_after_its_last_batch(at: At) -> None:
    await at.log.append(numbered("p", 0))
    at.clock.advance(DAY_NS + 1)
    await at.log.append(numbered("q", 0))
    with pytest.raises(ProducerForgottenError):
        at.log.append(numbered("p", 1))


@scenario(TopicRule(match="own/*", journal="{topic}"))
async def test_sequence_is_per_shard(at: At) -> None:
    await at.log.append(numbered("p", 0, topic="own/a"))
    await at.log.append(numbered("p", 1, topic="own/a"))
    assert not (await at.log.append(numbered("p", 0, topic="own/b"))).is_repeated


@scenario()
async def test_refused_batch_does_not_count(at: At) -> None:
    sent = batch(("a", [b"1"]), ("b\n", [b"2"]), producer="p", term=0, number=0)
    with pytest.raises(InvalidNameError, match="run 1"):
        at.log.append(sent)
    assert not (await at.log.append(numbered("p", 0))).is_repeated


@scenario(
    TopicRule(
        match="*",
        journal="main",
        rotate=Rotate(bytes_max=1, every_ns=3600 * 10**9),
        retain=Retain(age_ns=DAY_NS),
    )
)
async def test_repeated_batch_that_retention_has_removed_is_answered_without_offsets(
    at: At,
) -> None:
    await at.log.append(numbered("p", 0))
    at.clock.advance(2 * DAY_NS)
    await trim_log(at.log)
    again = await at.log.append(numbered("p", 0))
    assert again.is_repeated
    assert list(again.base_offsets) == []
    assert (await at.log.append(numbered("p", 1))).base_offsets == [2]


@scenario()
async def test_sequence_goes_on_after_its_topic_was_deleted(at: At) -> None:
    await at.log.append(numbered("p", 0))
    await at.log.metadata.delete_topic("a")
    assert (await at.log.append(numbered("p", 1))).base_offsets == [2]


@scenario()
async def test_name_of_a_publisher_is_checked(at: At) -> None:
    for name in ("", "x" * 256, "a\nb"):
        with pytest.raises(InvalidNameError):
            at.log.append(numbered(name, 0))
    assert (await at.log.append(numbered("p", 0))).base_offsets == [1]


@scenario()
async def test_other_batch_under_a_number_that_was_used_is_refused_not_taken_for_a_repetition(
    at: At,
) -> None:
    await at.log.append(numbered("p", 0, payload=b"first"))
    with pytest.raises(ProducerFault, match="number 0 of term 0 for another batch"):
        await at.log.append(numbered("p", 0, payload=b"quite another"))
    assert (await at.log.append(numbered("p", 0, payload=b"first"))).is_repeated
    under_way = at.log.append(numbered("p", 1, payload=b"second"))
    with pytest.raises(ProducerFault, match="number 1"):
        await at.log.append(numbered("p", 1, payload=b"yet another one"))
    await under_way
    assert read_payloads(await at.log.read("a", 0, 1)) == [b"first", b"second"]
