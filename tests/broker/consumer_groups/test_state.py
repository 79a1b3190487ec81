"""What a shard's state does with notes that its journal cannot take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import pytest

from runnel.broker.consumer_groups import GroupHolds
from runnel.broker.consumer_groups.ack_journals import ShardAckJournal
from runnel.errors import DiskFullError, MovedError
from runnel.group_rules import records
from runnel.group_rules.records import AckedRecord, ForgottenRecord, unpack_ranges
from runnel.log.log import ShardId

KEY = ("a", 0)
SHARD = ShardId("main")


class Journal:
    """Takes what it is given, or says that it has no room."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.snapshot: Callable[[], Iterable[bytes]] | None = None
        self.is_full = False
        self.tries = 0
        self.stored: list[tuple[int, int]] = []  # acknowledged ranges

    def add(self, content: bytes) -> asyncio.Future[None]:
        self.tries += 1
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.is_full:
            future.set_exception(DiskFullError("no room"))
        else:
            for record in records.decode(content):
                assert isinstance(record, AckedRecord)
                self.stored += unpack_ranges(record.ranges)
            future.set_result(None)
        return future


@dataclass(frozen=True)
class Term:
    """A term of ownership, with this state journal."""

    state: Journal
    id: ShardId = SHARD
    epoch: int = 1


class Scene:
    def __init__(self) -> None:
        self.journal = Journal()
        self.later: list[Callable[[], None]] = []  # what is to be tried again after a while
        self.state = ShardAckJournal(Term(self.journal), self.later.append, 0)

    async def ack(self, offset: int) -> None:
        self.state.note_acked(1, "", KEY, offset, offset + 1)
        for _ in range(5):
            await asyncio.sleep(0)


def scene(run: Callable[[Scene], Awaitable[None]]) -> Callable[[], None]:
    def test() -> None:
        async def play() -> None:
            async with asyncio.timeout(10):
                await run(Scene())

        asyncio.run(play())

    test.__name__ = run.__name__
    return test


@scene
async def test_after_a_failed_write_notes_wait_and_are_written_together_later(at: Scene) -> None:
    at.journal.is_full = True
    for offset in range(1, 101):
        await at.ack(offset)
    assert at.journal.tries == 1
    assert len(at.later) == 1
    at.journal.is_full = False
    at.later.pop()()
    await at.state.wait_stored()
    assert at.journal.stored == [(1, 2), (2, 101)]
    await at.ack(101)  # and the next is written at once again
    assert at.state.is_stored


@scene
async def test_whoever_waits_is_told_how_it_is_now(at: Scene) -> None:
    at.journal.is_full = True
    await at.ack(1)
    for _ in range(3):
        with pytest.raises(DiskFullError, match="no room"):
            await at.state.wait_stored()
    assert len(at.later) == 1
    at.journal.is_full = False
    await at.state.wait_stored()
    assert at.journal.stored == [(1, 2)]
    at.later.pop()()  # finds nothing to do
    await at.state.wait_stored()
    assert at.journal.stored == [(1, 2)]


@scene
async def test_what_is_noted_while_a_write_fails_is_not_forgotten(at: Scene) -> None:
    at.journal.is_full = True
    at.state.note_acked(1, "", KEY, 1, 2)
    first = at.state.wait_stored()
    await asyncio.sleep(0)  # the write has begun
    at.state.note_acked(1, "", KEY, 7, 8)
    second = at.state.wait_stored()
    for waiting in (first, second):
        with pytest.raises(DiskFullError):
            await waiting
    at.journal.is_full = False
    await at.state.wait_stored()
    assert sorted(at.journal.stored) == [(1, 2), (7, 8)]


def test_before_the_subscriptions_are_read_everything_is_owed() -> None:
    """The stores are opened with the holds, and the subscriptions are read from the stores."""
    holds = GroupHolds()
    assert not holds.is_empty
    assert holds.owed(("a", 0), 3, 9) == [(3, 9)]
    (hold,) = holds.holds_of(("a", 0))
    assert hold.holds(("a", 0), 2, 1)


# --- The end of the term ---


@scene
async def test_nothing_is_written_once_the_term_is_over(at: Scene) -> None:
    await at.ack(1)
    at.journal.is_full = True
    await at.ack(2)
    at.journal.is_full = False
    waiting = at.state.wait_stored()
    tries = at.journal.tries
    assert at.state.end()
    with pytest.raises(MovedError):
        await waiting
    for retry in at.later:
        retry()
    await asyncio.sleep(0)
    assert at.journal.tries == tries
    assert at.journal.stored == [(1, 2)]
    with pytest.raises(MovedError):
        at.state.note_acked(1, "", KEY, 3, 4)
    with pytest.raises(MovedError):
        at.state.note(ForgottenRecord(1, None, None))
    with pytest.raises(MovedError):
        await at.state.wait_stored()


@scene
async def test_write_under_way_at_the_end_may_be_lost(at: Scene) -> None:
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    at.journal.add = lambda content: written  # type: ignore[method-assign]
    await at.ack(1)
    waiting = at.state.wait_stored()
    assert at.state.end()
    with pytest.raises(MovedError):
        await waiting
    written.set_result(None)
    await asyncio.sleep(0)


@scene
async def test_planned_end_stores_every_note_and_awaits_dead_letters(at: Scene) -> None:
    at.state.letter_begins()
    at.state.note_acked(1, "", KEY, 1, 2)
    leaving = asyncio.ensure_future(at.state.leave())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not leaving.done()
    at.state.note_acked(1, "", KEY, 2, 3)  # the dead letter is stored
    at.state.letter_ends()
    await leaving
    assert at.journal.stored == [(1, 2), (2, 3)]
    assert not at.state.end()


@scene
async def test_planned_end_comes_even_if_notes_cannot_be_stored(at: Scene) -> None:
    at.journal.is_full = True
    at.state.note_acked(1, "", KEY, 1, 2)
    await at.state.leave()
    assert at.state.end()
