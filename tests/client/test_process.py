"""`process`: a function for every message, acked on return, nacked on exception, in order where there is one."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from runnel.client import Consumer, Work, WorkBatch, connect
from runnel.errors import ClientFault, UnknownSubscriptionError
from runnel.formats.dead_letters import parse_reason
from runnel.formats.work_heads import Consume, DeliveryPart, Leave, Nack
from tests.client.running import FakeTimers, in_both_loops, until
from tests.client.work_server import WorkServer


@asynccontextmanager
async def consuming(
    *, mode: str = "shared", timers: FakeTimers | None = None
) -> AsyncIterator[tuple[WorkServer, Consumer]]:
    async with (
        WorkServer(mode=mode) as server,
        connect(server.url, timers=timers) as bus,
        bus.consume("s", "a", mode=mode) as consumer,
    ):
        yield server, consumer


class Function:
    """What is processed waits until the test lets it go on."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self._gates: dict[int, asyncio.Future[None]] = {}

    async def __call__(self, work: Work) -> None:
        self.begun.append(work.offset)
        authenticator = self._gates[work.offset] = asyncio.get_running_loop().create_future()
        await authenticator
        self.ended.append(work.offset)

    def end(self, *offsets: int) -> None:
        for offset in offsets:
            self._gates[offset].set_result(None)

    def fail(self, offset: int, error: BaseException) -> None:
        self._gates[offset].set_exception(error)


@in_both_loops
async def test_so_many_at_a_time_each_acked_when_its_function_returns() -> None:
    async with consuming() as (server, consumer):
        function = Function()
        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(function, concurrency=3, stop=stop))
        server.lease(*[b"x"] * 6)
        await until(lambda: function.begun == [1, 2, 3])
        function.end(2)
        await until(lambda: server.acked == [DeliveryPart(1, 2, 3)])
        assert function.begun == [1, 2, 3, 4]
        function.end(1, 3, 4)
        await until(lambda: len(function.begun) == 6)
        function.end(5, 6)
        await until(lambda: consumer.statistics.acked == 6)
        stop.set()
        await processing


@in_both_loops
async def test_an_exception_is_a_nack_with_its_text_and_the_others_go_on() -> None:
    errors: list[tuple[int, str]] = []
    async with consuming() as (server, consumer):

        async def function(work: Work) -> None:
            if work.offset == 2:
                raise ValueError("no such customer " + "x" * 2000)

        stop = asyncio.Event()
        processing = asyncio.create_task(
            consumer.process(
                function,
                stop=stop,
                on_error=lambda work, error: errors.append((work.offset, type(error).__name__)),
            )
        )
        server.lease(b"1", b"2", b"3")
        await until(lambda: consumer.statistics.leased == 0 and server.nacked)
        stop.set()
        await processing
        assert server.nacked == [DeliveryPart(1, 2, 3)]
        (nack,) = server.asked(Nack)
        assert nack.delay_ms is None
        reason = parse_reason(nack.reason)
        assert reason.error.startswith("ValueError: no such customer x")
        assert len(reason.error) == 400
        assert reason.error_type == "ValueError"
        assert 'raise ValueError("no such customer' in reason.traceback
        assert len(nack.reason) < 1000
        assert errors == [(2, "ValueError")]
        assert consumer.statistics.acked == 2


@in_both_loops
async def test_of_a_long_traceback_the_innermost_lines_are_reported() -> None:
    def deep(left: int) -> None:
        if not left:
            raise LookupError("too deep")
        deep(left - 1)

    async with consuming() as (server, consumer):
        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(lambda _: deep(100), stop=stop))
        server.lease(b"1")
        await until(lambda: server.asked(Nack))
        stop.set()
        await processing
        (nack,) = server.asked(Nack)
        reason = parse_reason(nack.reason)
        assert reason.error == "LookupError: too deep"
        assert reason.traceback.splitlines()[-2:] == [
            '    raise LookupError("too deep")',
            "LookupError",
        ]
        assert len(nack.reason) < 1000


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@in_both_loops
async def test_an_error_whose_text_cannot_be_told_is_a_nack_all_the_same() -> None:
    async with consuming() as (server, consumer):

        async def function(work: Work) -> None:
            if work.offset == 1:
                raise ValueError("x\ud800")
            raise Unspeakable

        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(function, concurrency=1, stop=stop))
        server.lease(b"1", b"2")
        await until(lambda: len(server.asked(Nack)) == 2)
        stop.set()
        await processing
        told = [parse_reason(nack.reason) for nack in server.asked(Nack)]
        assert [reason.error for reason in told] == ["ValueError: x\\ud800", "Unspeakable"]
        assert told[1].error_type == f"{__name__}.Unspeakable"
        assert server.nacked == [DeliveryPart(1, 1, 2), DeliveryPart(1, 2, 3)]


@in_both_loops
async def test_acknowledging_in_a_plain_function_is_refused_and_says_what_to_do() -> None:
    errors: list[str] = []
    async with consuming() as (server, consumer):
        loop = asyncio.get_running_loop()

        async def elsewhere(work: Work) -> None:
            await work.ack()

        def function(work: Work) -> None:
            match work.offset:
                case 1:
                    work.ack()  # type: ignore[unused-coroutine]
                case 2:
                    work.nack()  # type: ignore[unused-coroutine]
                case 3:
                    work.extend(60)  # type: ignore[unused-coroutine]
                case 4:
                    asyncio.run(elsewhere(work))  # in a loop of its own
                case 5:
                    nack = consumer.nack(work, reason="as told")
                    asyncio.run_coroutine_threadsafe(nack, loop).result(10)

        stop = asyncio.Event()
        processing = asyncio.create_task(
            consumer.process(
                function,
                concurrency=1,
                stop=stop,
                on_error=lambda work, error: errors.append(f"{type(error).__name__}: {error}"),
            )
        )
        server.lease(*[b"x"] * 5)
        await until(lambda: len(server.nacked) == 5)
        stop.set()
        await processing
        assert len(errors) == 4
        for error in errors:
            assert error.startswith("ClientFault: the consumer's event loop does not run in this")
            assert "`process` acknowledges by itself" in error
        assert server.asked(Nack)[-1].reason == "as told"


@in_both_loops
async def test_a_plain_function_that_makes_a_coroutine_may_acknowledge_in_it() -> None:
    async with consuming() as (server, consumer):

        async def settle(work: Work) -> None:
            await work.nack(reason="odd")

        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(lambda work: settle(work), stop=stop))
        server.lease(b"1")
        await until(lambda: server.nacked)
        stop.set()
        await processing
        assert server.asked(Nack)[0].reason == "odd"


@in_both_loops
async def test_a_function_may_settle_its_message_itself() -> None:
    async with consuming() as (server, consumer):

        async def function(work: Work) -> None:
            if work.offset == 1:
                await work.nack(5, reason="later")

        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(function, stop=stop))
        server.lease(b"1", b"2")
        await until(lambda: consumer.statistics.acked == 1 and server.nacked)
        stop.set()
        await processing
        assert [nack.delay_ms for nack in server.asked(Nack)] == [5000]


@in_both_loops
async def test_something_cancelled_inside_a_function_is_its_failure_alone() -> None:
    async with consuming() as (server, consumer):

        async def function(work: Work) -> None:
            if work.offset == 1:
                gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                gone.cancel()
                await gone

        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(function, concurrency=1, stop=stop))
        server.lease(b"1", b"2")
        await until(lambda: consumer.statistics.acked == 1)
        stop.set()
        await processing
        assert server.nacked == [DeliveryPart(1, 1, 2)]


@in_both_loops
async def test_plain_functions_run_in_threads_as_many_as_asked_for() -> None:
    async with consuming() as (server, consumer):
        together = threading.Barrier(12, timeout=10)
        threads: set[int] = set()

        def function(prefix: bytes, work: Work) -> None:
            together.wait()
            assert work.payload.startswith(prefix)
            threads.add(threading.get_ident())

        stop = asyncio.Event()
        processing = asyncio.create_task(
            consumer.process(functools.partial(function, b"x"), concurrency=12, stop=stop)
        )
        server.lease(*[b"x"] * 12)
        await until(lambda: consumer.statistics.acked == 12)
        stop.set()
        await processing
        assert len(threads) == 12
        assert threading.get_ident() not in threads


@in_both_loops
async def test_messages_of_one_key_are_processed_one_after_the_other_and_others_beside() -> None:
    async with consuming(mode="key_shared") as (server, consumer):
        function = Function()
        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(function, concurrency=8, stop=stop))
        server.lease(*[b"x"] * 7, keys=[b"k", b"k", b"l", None, b"k", None, b"l"])
        await until(lambda: function.begun == [1, 3, 4, 6])
        function.end(3)
        await until(lambda: function.begun == [1, 3, 4, 6, 7])
        function.end(1)
        await until(lambda: function.begun[5:] == [2])
        function.end(2)
        await until(lambda: function.begun[6:] == [5])
        function.end(5, 4, 6, 7)
        await until(lambda: consumer.statistics.acked == 7)
        stop.set()
        await processing


@in_both_loops
async def test_after_a_failure_later_messages_of_its_key_wait_for_it_to_come_again() -> None:
    async with consuming(mode="key_shared") as (server, consumer):
        function = Function()
        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(function, stop=stop))
        server.lease(*[b"x"] * 3, keys=[b"k", b"k", b"l"])
        await until(lambda: function.begun == [1, 3])
        function.fail(1, ValueError("broken"))
        await until(lambda: server.given_up == [DeliveryPart(1, 2, 3)])
        server.lease(*[b"x"] * 2, keys=[b"k", b"k"])
        await until(lambda: function.begun == [1, 3, 1])
        function.end(1)
        await until(lambda: function.begun == [1, 3, 1, 2])
        function.end(2, 3)
        await until(lambda: consumer.statistics.leased == 0)
        stop.set()
        await processing


@in_both_loops
async def test_stop_begins_nothing_new_and_lets_running_work_finish() -> None:
    async with consuming() as (server, consumer):
        function = Function()
        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(function, concurrency=2, stop=stop))
        server.lease(*[b"x"] * 4)
        await until(lambda: function.begun == [1, 2])
        stop.set()
        for _ in range(5):
            await asyncio.sleep(0)
        function.end(1)
        await until(lambda: consumer.statistics.acked == 1)
        assert not processing.done()
        function.end(2)
        await processing
        assert function.begun == [1, 2]
        assert consumer.statistics.acked == 2
        assert not server.nacked


@in_both_loops
async def test_what_waited_behind_its_key_is_there_for_the_next_to_process() -> None:
    async with consuming(mode="key_shared") as (server, consumer):
        function = Function()
        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process(function, concurrency=2, stop=stop))
        server.lease(*[b"x"] * 4, keys=[b"k", b"k", b"k", b"l"])
        server.lease(b"y", offset=5, keys=[b"l"])
        await until(lambda: function.begun == [1, 4])
        stop.set()
        for _ in range(5):
            await asyncio.sleep(0)
        function.end(1, 4)
        await processing
        assert [(await anext(consumer)).offset for _ in range(3)] == [2, 3, 5]


@in_both_loops
async def test_cancellation_drains_and_what_does_not_finish_in_time_goes_back_uncounted() -> None:
    timers = FakeTimers()
    async with WorkServer() as server, connect(server.url, timers=timers) as bus:
        function = Function()

        async def run() -> None:
            async with bus.consume("s", "a") as consumer:
                await consumer.process(function, concurrency=2, drain_s=7)

        running = asyncio.create_task(run())
        await until(lambda: server.asked(Consume))
        server.lease(*[b"x"] * 4)
        await until(lambda: function.begun == [1, 2])
        running.cancel()
        await timers.advance(5)
        function.end(1)
        await timers.advance(1)
        assert not running.done()
        await timers.advance(2)
        await asyncio.wait((running,))
        assert running.cancelled()
        await until(lambda: server.asked(Leave))
        assert function.ended == [1]
        assert function.begun == [1, 2]
        assert server.acked == [DeliveryPart(1, 1, 2)]
        assert not server.nacked


@in_both_loops
async def test_a_second_cancellation_does_not_wait() -> None:
    async with consuming() as (server, consumer):
        function = Function()
        processing = asyncio.create_task(consumer.process(function))
        server.lease(b"1")
        await until(lambda: function.begun)
        processing.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not processing.done()
        processing.cancel()
        await asyncio.wait((processing,))
        assert processing.cancelled()


@in_both_loops
async def test_end_of_the_consumer_drains_and_raises_why() -> None:
    async with consuming() as (server, consumer):
        function = Function()
        processing = asyncio.create_task(consumer.process(function))
        server.lease(b"1")
        await until(lambda: function.begun)
        server.end_consumer("unknown_subscription", retriable=False)
        await until(lambda: consumer._error)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not processing.done()
        function.end(1)
        with pytest.raises(UnknownSubscriptionError):
            await processing
        assert consumer.statistics.late == 1


@in_both_loops
async def test_batches_are_acked_or_nacked_whole_and_keep_a_partition_in_order() -> None:
    async with consuming(mode="key_shared") as (server, consumer):
        begun: list[int] = []
        authenticator = asyncio.Event()

        async def function(batch: WorkBatch) -> None:
            begun.append(batch.delivery.id)
            await authenticator.wait()
            if batch.topic == "b":
                raise ValueError("broken")

        stop = asyncio.Event()
        processing = asyncio.create_task(consumer.process_batches(function, stop=stop))
        server.lease(b"1", b"2")
        server.lease(b"3", offset=3)
        server.lease(b"1", b"2", topic="b")
        await until(lambda: begun == [1, 3])
        authenticator.set()
        await until(lambda: begun == [1, 3, 2])
        await until(lambda: sorted(map(str, server.acked)) == ["1", "2"])
        stop.set()
        await processing
        assert server.nacked == [DeliveryPart(3, 1, 3)]


@in_both_loops
async def test_what_cannot_be_processed_is_refused() -> None:
    async with consuming() as (_, consumer):
        with pytest.raises(ClientFault, match="concurrency is 0"):
            await consumer.process(Function(), concurrency=0)
        with pytest.raises(ClientFault, match="cannot be called"):
            await consumer.process(None)  # type: ignore[arg-type]
