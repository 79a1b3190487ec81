"""Functions off the loop: on threads, and on the loop itself with timing from a seed."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Iterator
from random import Random

import pytest

from runnel.errors import ClosedError
from runnel.platform.workers import ThreadWorkers, Workers
from tests.fakes.power import PowerLoss
from tests.fakes.workers import SimulatedWorkers


@pytest.fixture(params=["threads", "simulated"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    workers: Workers = ThreadWorkers(2) if request.param == "threads" else simulated(1)
    yield workers
    workers.close()


@pytest.fixture
def threads() -> Iterator[ThreadWorkers]:
    workers = ThreadWorkers(2, name="test-worker")
    yield workers
    workers.close()


def simulated(seed: int) -> SimulatedWorkers:
    return SimulatedWorkers(Random(seed))


def raise_(error: BaseException) -> None:
    raise error


# --- Both ---


def test_results_come_back_to_whoever_asked(workers: Workers) -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*(workers.submit(pow, number, 2) for number in range(200)))

    assert asyncio.run(main()) == [number**2 for number in range(200)]


def test_an_exception_comes_back_and_the_worker_goes_on(workers: Workers) -> None:
    async def main() -> int:
        for _ in range(5):
            with pytest.raises(OSError, match="broken"):
                await workers.submit(raise_, OSError("broken"))
        return await workers.submit(abs, -3)

    assert asyncio.run(main()) == 3


def test_a_cancelled_call_still_runs_to_its_end(workers: Workers) -> None:
    ran: list[int] = []

    async def main() -> None:
        future = workers.submit(ran.append, 1)
        future.cancel()
        await workers.submit(abs, 1)
        workers.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert ran == [1]


def test_close_runs_what_was_submitted_and_refuses_more(workers: Workers) -> None:
    ran: list[int] = []

    async def main() -> None:
        futures = [workers.submit(ran.append, number) for number in range(50)]
        workers.close()
        workers.close()
        assert sorted(ran) == list(range(50))
        with pytest.raises(ClosedError):
            workers.submit(abs, 1)
        await asyncio.gather(*futures)

    asyncio.run(main())


# --- Threads ---


def test_functions_run_on_named_threads_that_are_not_daemons(threads: ThreadWorkers) -> None:
    async def main() -> threading.Thread:
        return await threads.submit(threading.current_thread)

    thread = asyncio.run(main())
    assert thread.name in ("test-worker-0", "test-worker-1")
    assert not thread.daemon


def test_as_many_functions_block_at_once_as_there_are_threads(threads: ThreadWorkers) -> None:
    barrier = threading.Barrier(2, timeout=10)

    async def main() -> None:
        await asyncio.gather(threads.submit(barrier.wait), threads.submit(barrier.wait))

    asyncio.run(main())


def test_stop_iteration_reaches_the_caller_as_an_error(threads: ThreadWorkers) -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await threads.submit(raise_, StopIteration())
        with pytest.raises(SystemExit):
            await threads.submit(raise_, SystemExit(3))
        assert await threads.submit(abs, -1) == 1

    asyncio.run(main())


def test_a_loop_closed_meanwhile_leaves_the_worker_alive(threads: ThreadWorkers) -> None:
    release = threading.Event()

    async def leave() -> None:
        threads.submit(release.wait, 10)
        threads.submit(release.wait, 10)

    async def come_back() -> int:
        return await threads.submit(abs, -7)

    asyncio.run(leave())
    release.set()
    assert asyncio.run(come_back()) == 7


def test_an_idle_worker_keeps_nothing_of_its_last_call(threads: ThreadWorkers) -> None:
    class Payload:
        pass

    freed = threading.Event()

    async def main() -> None:
        payload = Payload()
        weakref.finalize(payload, freed.set)
        await threads.submit(id, payload)

    asyncio.run(main())
    assert freed.wait(10)


def test_a_loop_that_never_rests_does_not_starve_the_workers(threads: ThreadWorkers) -> None:
    stop = False
    turns = 0

    async def keep_busy() -> None:
        nonlocal turns
        while not stop:
            until_ns = time.perf_counter_ns() + 500_000
            while time.perf_counter_ns() < until_ns:
                pass
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        nonlocal stop
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_busy())
            for _ in range(20):
                await threads.submit(abs, 1)
            stop = True

    asyncio.run(main())
    # Two to five turns each were seen, and thousands when the loop does not give way.
    assert turns < 20 * 100


def test_workers_need_a_thread() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ThreadWorkers(0)


# --- Simulated ---


def order_of_calls(seed: int) -> tuple[list[int], list[int]]:
    """In which order twenty calls ran, and in which their answers came."""
    workers = simulated(seed)
    ran: list[int] = []
    answered: list[int] = []

    async def call(number: int) -> None:
        await workers.submit(ran.append, number)
        answered.append(number)

    async def main() -> None:
        await asyncio.gather(*(call(number) for number in range(20)))

    asyncio.run(main())
    return ran, answered


def test_the_order_is_random_and_the_same_for_the_same_seed() -> None:
    assert order_of_calls(1) == order_of_calls(1)
    ran, answered = order_of_calls(1)
    assert ran != list(range(20))
    assert ran != answered
    assert sorted(ran) == sorted(answered) == list(range(20))
    assert order_of_calls(2) != order_of_calls(1)


def test_a_simulated_function_runs_on_the_loop_but_never_within_submit() -> None:
    async def main() -> None:
        for seed in range(20):
            ran: list[int] = []
            future = simulated(seed).submit(ran.append, 1)
            assert ran == []
            await future
            assert ran == [1]

    asyncio.run(main())


def test_power_loss_ends_everything_that_waits_or_comes_later() -> None:
    workers = simulated(3)
    ran: list[int] = []

    async def main() -> None:
        lost = workers.submit(raise_, PowerLoss("now"))
        futures = [workers.submit(ran.append, number) for number in range(50)]
        with pytest.raises(PowerLoss, match="now"):
            await lost
        run_before = len(ran)
        answers = await asyncio.gather(*futures, return_exceptions=True)
        assert any(isinstance(answer, PowerLoss) for answer in answers)
        assert len(ran) == run_before
        with pytest.raises(PowerLoss, match="now"):
            await workers.submit(ran.append, 99)
        assert len(ran) == run_before

    asyncio.run(main())
    assert str(workers.power_lost) == "now"
