"""Consumers without `await`: work in the calling thread, leases kept by the loop's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from runnel.client import (
    BlockingConsumer,
    BlockingWork,
    BlockingWorkBatch,
    Work,
    connect_blocking,
)
from runnel.errors import ClientFault, LateAckError, UnknownSubscriptionError
from runnel.formats import wire, work_heads
from runnel.formats.work_heads import (
    Consume,
    DeadLettersHead,
    DeleteSubscription,
    DeliveryPart,
    Leave,
    MakeSubscription,
    Nack,
    Renew,
    SettleDead,
    WorkOptions,
)
from tests.client.fake_server import Peer, refusing
from tests.client.test_blocking import ServerThread
from tests.client.work_server import WorkServer

SHORT = WorkOptions(150, 3_600_000, 8, 1_000, 300_000, 2.0, 3_600_000)


@pytest.fixture
def server() -> WorkServer:
    return WorkServer()


@pytest.fixture
def thread(server: WorkServer) -> Iterator[ServerThread]:
    thread = ServerThread(server)
    yield thread
    thread.stop()


def leasing(server: WorkServer, *payloads: bytes) -> None:
    """Every consumer is given these at once."""

    def react(peer: Peer, request: Consume, tail: memoryview) -> None:
        server.react_usually(peer, request, tail)
        server.lease(*payloads)

    server.on(Consume, react)


def test_messages_are_iterated_and_acked_in_the_calling_thread(
    thread: ServerThread, server: WorkServer
) -> None:
    leasing(server, *[b"x"] * 3000)
    with connect_blocking(server.url) as bus:
        with bus.consume("s", "a", mode="shared") as consumer:
            for work in consumer:
                work.ack()
                if work.offset == 3000:
                    break
            assert consumer.mode == "shared"
            assert consumer.subscription == "s"
        acked = sum(
            3000 if isinstance(told, int) else told.end - told.begin for told in server.acked
        )
        assert acked == 3000
        assert len(server.asked(work_heads.Ack)) < 100
        assert server.asked(Leave)
        assert consumer.statistics.acked == 3000


def test_a_loop_that_was_broken_off_goes_on_and_batches_follow(
    thread: ServerThread, server: WorkServer
) -> None:
    leasing(server, b"1", b"2", b"3")
    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:
        first = next(iter(consumer))
        second = next(iter(consumer))
        assert (first.offset, second.offset) == (1, 2)
        first.nack(1.5, reason="odd")
        second.ack(stored=True)
        next(iter(consumer)).extend(60)
        thread.do(server.lease, b"4", b"5")
        batch = next(consumer.batches())
        assert [work.payload for work in batch.works()] == [b"4", b"5"]
        batch.ack()
        consumer.flush()
        assert server.nacked == [DeliveryPart(1, 1, 2)]
        assert server.acked == [DeliveryPart(1, 2, 3), 2]
        assert server.asked(Renew)[-1] == Renew(1, [1], 60_000)


def test_leases_are_renewed_while_the_calling_thread_is_busy(
    thread: ServerThread, server: WorkServer
) -> None:
    server.options = SHORT
    renewed = threading.Event()
    server.on(Renew, lambda peer, request, tail: renewed.set())
    leasing(server, b"1")
    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:
        work = next(iter(consumer))
        assert renewed.wait(10)
        work.ack()


def test_late_acks_are_reported(thread: ServerThread, server: WorkServer) -> None:
    leasing(server, b"1", b"2")
    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:
        work = next(iter(consumer))
        server.late = [DeliveryPart(1, 1, 2)]
        with pytest.raises(LateAckError):
            work.ack(stored=True)
        assert [late.begin for late in consumer.late] == [1]


def test_acks_may_come_from_many_threads(thread: ServerThread, server: WorkServer) -> None:
    leasing(server, *[b"x"] * 400)
    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:
        works = []
        for work in consumer:
            works.append(work)
            if len(works) == 400:
                break

        def ack(begin: int) -> None:
            for work in works[begin::4]:
                work.ack()

        threads = [threading.Thread(target=ack, args=(begin,)) for begin in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        consumer.flush()
        assert consumer.statistics.acked == 400
        assert consumer.statistics.leased == 0


def test_process_runs_in_threads_until_stopped(thread: ServerThread, server: WorkServer) -> None:
    leasing(server, *[b"x"] * 20)
    done: list[int] = []
    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:

        def function(work: BlockingWork) -> None:
            assert threading.current_thread().name.startswith("runnel work")
            done.append(work.offset)
            if len(done) == 20:
                consumer.stop()

        consumer.process(function, concurrency=4)
    assert sorted(done) == list(range(1, 21))
    assert not server.nacked


def test_a_function_of_process_may_settle_and_extend_its_message_in_its_thread(
    thread: ServerThread, server: WorkServer
) -> None:
    leasing(server, b"1", b"2", b"3", b"4")
    failed: list[BlockingWork] = []

    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:

        def function(work: BlockingWork) -> None:
            match work.offset:
                case 1:
                    work.nack(5, reason="later")
                case 2:
                    work.ack(stored=True)
                    assert server.acked
                case 3:
                    work.extend(60)
                    work.ack()
                    raise ValueError("too late to fail")
                case 4:
                    consumer.stop()

        consumer.process(function, concurrency=1, on_error=lambda work, error: failed.append(work))
        assert consumer.statistics.acked == 3
    assert server.nacked == [DeliveryPart(1, 1, 2)]
    assert [nack.delay_ms for nack in server.asked(Nack)] == [5000]
    assert server.asked(Renew)[-1] == Renew(1, [1], 60_000)
    (work,) = failed
    assert isinstance(work, BlockingWork)
    assert work.offset == 3


def test_a_function_of_process_batches_may_settle_its_batch_in_its_thread(
    thread: ServerThread, server: WorkServer
) -> None:
    leasing(server, b"1", b"2")
    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:

        def function(batch: BlockingWorkBatch) -> None:
            first, _ = batch.works()
            first.ack()
            batch.nack(reason="the others")
            consumer.stop()

        consumer.process_batches(function)
    assert server.acked == [DeliveryPart(1, 1, 2)]
    assert server.nacked == [DeliveryPart(1, 2, 3)]


def test_a_coroutine_function_of_process_is_given_what_can_be_awaited(
    thread: ServerThread, server: WorkServer
) -> None:
    leasing(server, b"1")
    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:

        async def function(work: Work) -> None:
            await work.nack(reason="odd")
            consumer.stop()

        consumer.process(function)
        with pytest.raises(ClientFault, match="cannot be called"):
            consumer.process(None)  # type: ignore[arg-type]
    assert server.nacked == [DeliveryPart(1, 1, 2)]


def test_what_is_no_work_is_refused_in_the_calling_thread_and_other_acks_are_reported(
    thread: ServerThread, server: WorkServer
) -> None:
    leasing(server, b"1", b"2")
    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:
        first = next(iter(consumer))
        refuses(consumer, first)
        first.ack()
    assert server.acked == [DeliveryPart(1, 1, 2)]
    assert not server.nacked


def refuses(consumer: BlockingConsumer, work: BlockingWork) -> None:
    with pytest.raises(ClientFault, match="None is no work"):
        consumer.ack(work, None)  # type: ignore[arg-type]
    with pytest.raises(ClientFault, match="None is no work"):
        consumer.nack(work, None)  # type: ignore[arg-type]
    with pytest.raises(ClientFault, match="the reason is 5"):
        work.nack(reason=5)  # type: ignore[arg-type]


def test_an_interrupted_process_drains(thread: ServerThread, server: WorkServer) -> None:
    leasing(server, b"1", b"2")
    begun = threading.Event()
    go_on = threading.Event()
    ended: list[int] = []

    def function(work: BlockingWork) -> None:
        begun.set()
        assert go_on.wait(10)
        ended.append(work.offset)

    with connect_blocking(server.url) as bus, bus.consume("s", "a") as consumer:
        processing = threading.Thread(target=consumer.process, args=(function,))
        processing.start()
        assert begun.wait(10)
        consumer.stop()
        go_on.set()
        processing.join(10)
        assert not processing.is_alive()
    assert ended


def test_verbs_of_subscriptions_and_dead_letters(thread: ServerThread, server: WorkServer) -> None:
    server.on(MakeSubscription, lambda peer, r, _: peer.say(wire.Done(r.id)))
    server.on(DeleteSubscription, refusing("unknown_subscription", retriable=False))
    server.on(SettleDead, lambda peer, r, _: peer.say(work_heads.SettledHead(r.id, 3)))
    server.on(DeadLettersHead, lambda peer, r, _: peer.say(work_heads.DeadList(r.id, 0)))
    with connect_blocking(server.url) as bus:
        bus.make_subscription("s", "a", mode="multicast")
        with pytest.raises(UnknownSubscriptionError):
            bus.delete_subscription("s")
        assert list(bus.dead_letters("s")) == []
        assert bus.redrive("s", "all") == 3
        assert bus.drop_dead("s", [1, 2]) == 3
    redriven, dropped = server.asked(SettleDead)
    assert (redriven.is_redriven, redriven.is_all, redriven.offsets) == (True, True, [])
    assert (dropped.is_redriven, dropped.is_all, dropped.offsets) == (False, False, [1, 2])
