"""Time: the machine's, and the one that a test moves."""

from __future__ import annotations

import asyncio

import pytest

from runnel.platform.clock import Clock, SystemClock
from tests.fakes.clock import NS_PER_SECOND, VirtualClock


def test_the_system_clock_tells_and_waits() -> None:
    clock: Clock = SystemClock()

    async def main() -> None:
        before_ns = clock.monotonic_ns()
        await clock.sleep(0.001)
        assert clock.monotonic_ns() - before_ns >= 1_000_000 * 0.9

    assert clock.time_ns() > 1_700_000_000 * NS_PER_SECOND
    asyncio.run(main())


def test_virtual_time_stands_still_until_advanced() -> None:
    clock: Clock = VirtualClock(start_ns=100)
    assert (clock.time_ns(), clock.monotonic_ns()) == (100, 0)
    assert isinstance(clock, VirtualClock)
    clock.advance(7)
    assert (clock.time_ns(), clock.monotonic_ns()) == (107, 7)


def test_the_wall_clock_steps_back_alone() -> None:
    clock = VirtualClock(start_ns=100)
    clock.step_wall(-60)
    assert (clock.time_ns(), clock.monotonic_ns()) == (40, 0)
    with pytest.raises(ValueError, match="step_wall"):
        clock.advance(-1)


def test_sleepers_wake_by_deadline_and_then_in_the_order_of_sleeping() -> None:
    clock = VirtualClock()
    awoken: list[str] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        awoken.append(name)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for name, seconds in [("late", 3), ("first", 1), ("second", 1), ("middle", 2)]:
                group.create_task(sleeper(name, seconds))
            await asyncio.sleep(0)
            assert clock.next_wake_ns == NS_PER_SECOND
            clock.advance(NS_PER_SECOND - 1)
            await asyncio.sleep(0)
            assert awoken == []
            clock.advance(1)
            await asyncio.sleep(0)
            assert awoken == ["first", "second"]
            clock.advance(5 * NS_PER_SECOND)
        assert awoken == ["first", "second", "middle", "late"]
        assert clock.next_wake_ns is None

    asyncio.run(main())


def test_a_cancelled_sleeper_is_forgotten() -> None:
    clock = VirtualClock()

    async def main() -> None:
        task = asyncio.ensure_future(clock.sleep(1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert clock.next_wake_ns is None
        clock.advance(2 * NS_PER_SECOND)

    asyncio.run(main())


def test_sleeping_for_no_time_only_lets_the_loop_turn() -> None:
    clock = VirtualClock()
    asyncio.run(clock.sleep(0))
    asyncio.run(clock.sleep(-1))
    assert clock.monotonic_ns() == 0
