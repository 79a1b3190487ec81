"""The publisher: when it sends batches, where to, and how it treats refused and lost ones."""

from __future__ import annotations

import asyncio

import pytest

from runnel.client import Publisher, connect
from runnel.client.producer import shard_sender
from runnel.errors import (
    BusyError,
    ClientFault,
    ClosedError,
    ConnectionLostError,
    DiskFullError,
    InvalidNameError,
    LimitExceededError,
    ProducerFault,
    ProducerFencedError,
    TimeoutExpiredError,
)
from runnel.formats import wire
from runnel.topics.partitions import partition_of_key
from tests.client.fake_server import FakeServer, Peer, refusing, silent
from tests.client.running import FakeTimers, in_both_loops, until

# --- When batches leave ---


@in_both_loops
async def test_a_lone_send_leaves_at_once() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher("a") as publisher:
        publisher.send(b"1")
        await until(lambda: server.batches)
        assert server.stored == {("a", 0): [b"1"]}


@in_both_loops
async def test_what_is_sent_in_one_wake_up_fills_batches() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher("a") as publisher:
        for _ in range(10_000):
            publisher.send(b"x")
        await publisher.flush()
        assert sum(map(len, server.batches)) == 10_000
        assert len(server.batches) <= 4
        assert max(map(len, server.batches)) == 4000


@in_both_loops
async def test_batches_are_full_at_their_bytes() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        async with bus.publisher("a", batch_bytes_max=10_000) as publisher:
            for _ in range(100):
                publisher.send(bytes(936))
        assert {len(batch) for batch in server.batches} == {10}


async def made_busy(publisher: Publisher, server: FakeServer) -> int:
    """Leave so many batches unacknowledged that the next one waits for company; returns how many were sent."""
    publisher.send(b"0")
    await publisher.flush()
    server.hold_answers = True
    for count in range(2, 2 + shard_sender._IN_FLIGHT_EAGER):
        publisher.send(b"x")
        await until(lambda count=count: len(server.batches) == count)  # type: ignore[misc]
    return len(server.batches)


@in_both_loops
async def test_a_busy_publisher_waits_for_company_until_an_acknowledgement_comes() -> None:
    async with FakeServer() as server, connect(server.url, timers=FakeTimers()) as bus:
        publisher = bus.publisher("a")
        sent = await made_busy(publisher, server)
        for _ in range(3):
            publisher.send(b"y")
            for _ in range(20):
                await asyncio.sleep(0)
        assert len(server.batches) == sent
        server.release(1)
        await until(lambda: len(server.batches) == sent + 1)
        assert len(server.batches[-1]) == 3
        server.hold_answers = False
        server.release()
        await publisher.close()


@in_both_loops
async def test_a_busy_publisher_waits_for_company_no_longer_than_it_lingers() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers) as bus:
        publisher = bus.publisher("a", linger_ms=2)
        sent = await made_busy(publisher, server)
        publisher.send(b"y")
        await timers.advance(0.0015)
        assert len(server.batches) == sent
        await timers.advance(0.001)
        await until(lambda: len(server.batches) == sent + 1)
        server.hold_answers = False
        server.release()
        await publisher.close()


# --- Where they go ---


@in_both_loops
async def test_many_topics_of_one_shard_go_in_one_batch() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher() as publisher:
        for number in range(500):
            publisher.send(b"%d" % number, topic=f"t{number}")
        await publisher.flush()
        assert [batch.envelope.run_count for batch in server.batches] == [500]
        assert len(server.asked(wire.Routes)) == 1


@in_both_loops
async def test_topics_of_several_journals_go_in_batches_of_their_own() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher() as publisher:
        server.routes["b"] = wire.Route("b", "disk", [wire.Owner("other", 0, 1)])
        for number in range(10):
            publisher.send(b"%d" % number, topic="ab"[number % 2])
        await publisher.flush()
        assert [batch.envelope.topics for batch in server.batches] == [["a"], ["b"]]
        assert server.stored["b", 0] == [b"1", b"3", b"5", b"7", b"9"]


@in_both_loops
async def test_keys_choose_the_partition_and_keep_their_order() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher("a") as publisher:
        server.routes["a"] = wire.Route("a", "disk", [wire.Owner("main", 0, 1)] * 4)
        for number in range(100):
            publisher.send(b"%d" % number, key=b"k%d" % (number % 5))
        await publisher.flush()
        for key in range(5):
            held = server.stored["a", partition_of_key(b"k%d" % key, 4)]
            assert [p for p in held if int(p) % 5 == key] == [b"%d" % n for n in range(key, 100, 5)]


@in_both_loops
async def test_messages_without_a_key_take_turns_by_batch() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher("a") as publisher:
        server.routes["a"] = wire.Route("a", "disk", [wire.Owner("main", 0, 1)] * 3)
        for _ in range(3):
            publisher.send(b"1")
            publisher.send(b"2")
            await publisher.flush()
        assert server.stored == {("a", partition): [b"1", b"2"] for partition in range(3)}


@in_both_loops
async def test_messages_wait_in_order_while_the_route_of_a_new_topic_is_asked() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher() as publisher:
        waiting: list[tuple[Peer, wire.Routes]] = []
        publisher.send(b"0", topic="known")
        await publisher.flush()
        server.on(wire.Routes, lambda peer, request, _: waiting.append((peer, request)))
        publisher.send(b"1", topic="new")
        await until(lambda: waiting)
        publisher.send(b"2", topic="known")
        publisher.send(b"3", topic="newer")
        server.usual(wire.Routes)
        for peer, request in waiting:
            server.react_usually(peer, request, memoryview(b""))
        await publisher.flush()
        assert server.stored == {
            ("known", 0): [b"0", b"2"],
            ("new", 0): [b"1"],
            ("newer", 0): [b"3"],
        }


@in_both_loops
async def test_a_line_follows_its_shard_to_another_node() -> None:
    async with FakeServer() as first, FakeServer() as second, connect(first.url) as bus:
        elsewhere = wire.Route("a", "disk", [wire.Owner("main", 0, 2, second.address)])

        def moved(peer: Peer, request: wire.Publish, tail: memoryview) -> None:
            routes = (elsewhere,)
            peer.say(wire.Error(request.id, "moved", "to node 2", retriable=True, routes=routes))

        first.on(wire.Publish, moved)
        async with bus.publisher("a", name="p") as publisher:
            second.producers["p"] = (first.terms, 0, [])
            for number in range(3):
                publisher.send(b"%d" % number)
            await publisher.flush()
            publisher.send(b"3")
        assert second.stored == {("a", 0): [b"0", b"1", b"2", b"3"]}
        assert first.stored == {}


# --- Acknowledgements ---


@in_both_loops
async def test_submit_tells_where_each_message_is() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher() as publisher:
        futures = [publisher.submit(b"x", topic="ab"[number % 2]) for number in range(4)]
        receipts = await asyncio.gather(*futures)
        assert [(r.topic, r.offset, r.level) for r in receipts] == [
            ("a", 1, "stored"),
            ("b", 1, "stored"),
            ("a", 2, "stored"),
            ("b", 2, "stored"),
        ]


@in_both_loops
async def test_flush_waits_for_what_was_sent_before_it_and_not_for_the_rest() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publisher = bus.publisher("a")
        server.hold_answers = True
        publisher.send(b"1")
        flushing = asyncio.ensure_future(publisher.flush())
        await until(lambda: len(server.batches) == 1)
        publisher.send(b"2")
        await until(lambda: len(server.batches) == 2)
        assert not flushing.done()
        server.release(1)
        await flushing
        server.release()
        await publisher.close()


@in_both_loops
async def test_flush_raises_the_first_failure_and_forgets_it() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher("a") as publisher:
        server.on(wire.Publish, refusing("limit_exceeded", retriable=False))
        publisher.send(b"1")
        with pytest.raises(LimitExceededError):
            await publisher.flush()
        server.usual(wire.Publish)
        publisher.send(b"2")
        await publisher.flush()
        assert server.stored == {("a", 0): [b"2"]}


@in_both_loops
async def test_a_failure_that_a_future_told_is_not_told_again_by_flush() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher("a") as publisher:
        server.on(wire.Publish, refusing("limit_exceeded", retriable=False))
        with pytest.raises(LimitExceededError):
            await publisher.submit(b"1")
        await publisher.flush()


@in_both_loops
async def test_a_message_that_is_too_large_is_refused_alone() -> None:
    async with (
        FakeServer(message_bytes_max=100_000) as server,
        connect(server.url) as bus,
        bus.publisher("a") as publisher,
    ):
        before, large, after = (publisher.submit(bytes(n)) for n in (10, 200_000, 20))
        assert (await before).offset == 1
        assert (await after).offset == 2
        with pytest.raises(LimitExceededError, match="200000"):
            await large


@in_both_loops
async def test_level_none_is_not_answered_but_flush_knows_that_the_broker_has_it() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.publisher("a", level="none") as publisher,
    ):
        for _ in range(3000):
            publisher.send(b"x")
        await publisher.flush()
        assert len(server.stored["a", 0]) == 3000
        assert (await publisher.submit(b"y")).level == "none"


@in_both_loops
async def test_a_refusal_at_level_none_is_told_at_the_next_flush() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publisher = bus.publisher("a", level="none")
        server.on(wire.Publish, refusing("invalid_name", retriable=False))
        publisher.send(b"x")
        with pytest.raises(InvalidNameError):
            await publisher.flush()
        await publisher.close()


# --- Room ---


@in_both_loops
async def test_a_loop_that_never_waits_is_reported() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publisher = bus.publisher("a", buffer_bytes_max=100_000)
        with pytest.raises(BusyError, match="ready"):  # noqa: PT012
            for _ in range(1000):
                publisher.send(bytes(1000))
        await publisher.flush()
        publisher.send(b"and goes on")
        await publisher.close()
        assert server.stored["a", 0][-1] == b"and goes on"


@in_both_loops
async def test_ready_waits_for_room() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publisher = bus.publisher("a", buffer_bytes_max=100_000)
        server.hold_answers = True
        for _ in range(150):
            publisher.send(bytes(1000))
        await until(lambda: sum(map(len, server.batches)) == 150)
        waiting = asyncio.ensure_future(publisher.ready())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        server.hold_answers = False
        server.release()
        await waiting
        assert publisher.buffered_bytes <= 100_000
        await publisher.close()


@in_both_loops
async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publisher = bus.publisher("a", buffer_bytes_max=1000)
        server.hold_answers = True
        publisher.send(bytes(2000))
        for waiting in (publisher.ready(), publisher.flush()):
            task = asyncio.ensure_future(waiting)
            for _ in range(5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
            assert task.cancelled()
        assert not publisher._waiting
        assert not publisher._flushing
        await until(lambda: server.batches)
        server.hold_answers = False
        server.release()
        await publisher.close()


# --- Lost connections ---


@in_both_loops
async def test_what_was_not_sent_waits_for_the_connection() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher("a") as publisher:
        publisher.send(b"0")
        await publisher.flush()
        await server.stop()
        await until(lambda: not bus.is_connected)
        publisher.send(b"1")
        await server.start()
        publisher.send(b"2")
        await publisher.flush()
        assert server.stored == {("a", 0): [b"0", b"1", b"2"]}


@in_both_loops
async def test_what_was_sent_and_not_answered_may_have_been_stored_or_not() -> None:
    async with FakeServer() as server, connect(server.url) as bus, bus.publisher("a") as publisher:
        server.on(wire.Publish, silent)
        publisher.send(b"1")
        await until(lambda: server.asked(wire.Publish))
        server.drop()
        with pytest.raises(ConnectionLostError, match="stored or not"):
            await publisher.flush()


@in_both_loops
async def test_a_named_publisher_sends_again_and_nothing_is_stored_twice() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        async with bus.publisher("a", name="p", batch_messages_max=10) as publisher:
            publisher.send(b"0")
            await publisher.flush()
            server.hold_answers = True  # what is stored now is never answered
            for number in range(1, 35):
                publisher.send(b"%d" % number)
            await until(lambda: sum(map(len, server.batches)) >= 21)
            server.drop()
            server.hold_answers = False
            for number in range(35, 50):
                publisher.send(b"%d" % number)
            await publisher.flush()
        assert server.stored["a", 0] == [b"%d" % number for number in range(50)]


@in_both_loops
async def test_a_named_publisher_that_was_fenced_has_ended() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publisher = await bus.publisher("a", name="p").__aenter__()
        server.producers["p"] = (9, 0, [])
        publisher.send(b"1")
        with pytest.raises(ProducerFencedError):
            await publisher.flush()
        with pytest.raises(ProducerFencedError):
            publisher.send(b"2")
        with pytest.raises(ProducerFencedError):
            await publisher.ready()


@in_both_loops
async def test_a_gap_in_a_named_publishers_sequence_ends_it() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publisher = await bus.publisher("a", name="p").__aenter__()
        server.on(wire.Publish, refusing("producer_gap", retriable=False))
        publisher.send(b"1")
        with pytest.raises(ProducerFault):
            await publisher.flush()
        assert publisher.is_ended


@in_both_loops
async def test_a_named_publisher_asks_for_its_term_when_it_is_entered() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publisher = bus.publisher("a", name="p")
        with pytest.raises(ClientFault, match="async with"):
            publisher.send(b"1")
        async with publisher:
            publisher.send(b"1")
        assert [(b.envelope.producer, b.envelope.term) for b in server.batches] == [("p", 1)]
        with pytest.raises(ClientFault, match="stored"):
            bus.publisher("a", name="p", level="received")


# --- Refusals ---


@pytest.mark.parametrize("name", [None, "p"])
@pytest.mark.parametrize("code", ["busy", "disk_full"])
def test_what_the_broker_cannot_take_now_is_sent_again_in_order(
    name: str | None, code: str
) -> None:
    @in_both_loops
    async def scenario() -> None:
        timers = FakeTimers()
        async with FakeServer() as server, connect(server.url, timers=timers) as bus:
            server.on(wire.Publish, refusing(code, retriable=True))
            async with bus.publisher("a", name=name, batch_messages_max=2) as publisher:
                publisher.send(b"1")
                await timers.advance_until(lambda: len(server.asked(wire.Publish)) >= 3)
                for number in range(2, 10):
                    publisher.send(b"%d" % number)
                await timers.advance_until(lambda: len(server.asked(wire.Publish)) >= 5)
                assert server.stored == {}
                server.usual(wire.Publish)
                flushing = asyncio.ensure_future(publisher.flush())
                await timers.advance_until(flushing.done)
                await flushing
            assert server.stored == {("a", 0): [b"%d" % number for number in range(1, 10)]}

    scenario()


@in_both_loops
async def test_batches_behind_a_refused_one_of_a_named_publisher_take_its_number() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publishes = iter(range(100))

        def refuse_second(peer: Peer, request: wire.Publish, tail: memoryview) -> None:
            if next(publishes) == 1:
                refusing("limit_exceeded", retriable=False)(peer, request, tail)
            else:
                server.react_usually(peer, request, tail)

        server.on(wire.Publish, refuse_second)
        async with bus.publisher("a", name="p", batch_messages_max=1) as publisher:
            futures = [publisher.submit(b"%d" % number) for number in range(5)]
            await asyncio.wait(futures)
            assert isinstance(futures[1].exception(), LimitExceededError)
            assert [f.result().offset for f in futures if f is not futures[1]] == [1, 2, 3, 4]
        assert server.stored == {("a", 0): [b"0", b"2", b"3", b"4"]}
        assert [batch.envelope.number for batch in server.batches] == [0, 1, 2, 3]


# --- Deadlines and the end ---


@in_both_loops
async def test_a_deadline_that_passes_without_a_connection_says_so() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers, deadline_s=5) as bus:
        publisher = bus.publisher("a")
        publisher.send(b"0")
        await publisher.flush()
        await server.stop()
        await until(lambda: not bus.is_connected)
        lost = publisher.submit(b"1")
        await asyncio.sleep(0)
        await timers.advance_until(lost.done)
        with pytest.raises(TimeoutExpiredError, match=f"not connected to {server.address}"):
            await lost
        await publisher.close()


@in_both_loops
async def test_publisher_without_a_deadline_waits_however_long_it_takes() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers, deadline_s=5) as bus:
        publisher = bus.publisher("a", deadline_s=None)
        publisher.send(b"0")
        await publisher.flush()
        server.on(wire.Publish, silent)
        server.on(wire.Send, silent)
        patient = publisher.submit(b"1")
        hasty = asyncio.ensure_future(bus.publish("a", b"2"))
        waiting = asyncio.ensure_future(bus.publish("a", b"3", deadline_s=None))
        await timers.advance_until(hasty.done)
        await timers.advance(5)
        assert isinstance(hasty.exception(), TimeoutExpiredError)
        assert not patient.done()
        assert not waiting.done()
        waiting.cancel()
        publisher.end(ClosedError("the test is over"))
        with pytest.raises(ClosedError):
            await patient


@in_both_loops
async def test_what_the_deadline_finds_under_way_again_is_not_said_to_be_refused() -> None:
    """It may be stored after all: a caller that takes it for refused and sends it again stores it twice."""
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers, deadline_s=5) as bus:

        def refuse_once(peer: Peer, request: wire.Publish, tail: memoryview) -> None:
            server.on(wire.Publish, silent)
            refusing("disk_full", retriable=True)(peer, request, tail)

        server.on(wire.Publish, refuse_once)
        publisher = bus.publisher("a")
        receipt = publisher.submit(b"1")
        await timers.advance_until(receipt.done)
        with pytest.raises(TimeoutExpiredError, match="before, it was refused") as raised:
            await receipt
        assert isinstance(raised.value.__cause__, DiskFullError)
        await publisher.close()


@in_both_loops
async def test_a_refusal_that_lasts_until_the_deadline_is_raised_itself() -> None:
    timers = FakeTimers()
    async with FakeServer() as server, connect(server.url, timers=timers, deadline_s=5) as bus:
        publisher = bus.publisher("a")
        server.on(wire.Publish, refusing("disk_full", retriable=True))
        publisher.send(b"1")
        flushing = asyncio.ensure_future(publisher.flush())
        await timers.advance_until(flushing.done)
        with pytest.raises(DiskFullError):
            await flushing
        await publisher.close()


@in_both_loops
async def test_closing_flushes_and_then_nothing_is_taken() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        publisher = bus.publisher("a")
        publisher.send(b"1")
        await publisher.close()
        assert server.stored == {("a", 0): [b"1"]}
        with pytest.raises(ClosedError):
            publisher.send(b"2")


@in_both_loops
async def test_closing_the_bus_flushes_its_publishers() -> None:
    async with FakeServer() as server:
        async with connect(server.url) as bus:
            publisher = bus.publisher("a")
            publisher.send(b"1")
        assert server.stored == {("a", 0): [b"1"]}
        assert publisher.is_ended


@in_both_loops
async def test_an_error_in_the_body_is_not_hidden_by_the_publisher() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Publish, silent)
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with bus.publisher("a") as publisher:
                publisher.send(b"1")
                raise ZeroDivisionError


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"level": "most"}, "level"),
        ({"batch_messages_max": 0}, "batch_messages_max"),
        ({"batch_bytes_max": 2**22}, "batch_bytes_max"),
        ({"compression": "zip"}, "compression"),
        ({"topic": "a\n"}, "topic"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, object], text: str) -> None:
    @in_both_loops
    async def scenario() -> None:
        async with FakeServer() as server, connect(server.url) as bus:
            with pytest.raises(ClientFault, match=text):
                bus.publisher(**options)  # type: ignore[arg-type]

    scenario()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_batches_can_be_compressed(compression: str) -> None:
    @in_both_loops
    async def scenario() -> None:
        async with FakeServer() as server, connect(server.url) as bus:
            async with bus.publisher("a", compression=compression) as publisher:
                for _ in range(1000):
                    publisher.send(bytes(100))
            assert sum(len(batch.body) for batch in server.batches) < 20_000
            assert server.stored["a", 0] == [bytes(100)] * 1000

    scenario()


@in_both_loops
async def test_answers_that_overtake_each_other_do_not_disturb_a_named_publishers_numbers() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        async with bus.publisher("a", name="p", batch_messages_max=10) as publisher:
            server.hold_answers = True
            for number in range(30):
                publisher.send(b"%d" % number)
            await until(lambda: sum(map(len, server.batches)) == 30)
            server._held.reverse()  # the broker may answer requests in any order
            server.hold_answers = False
            server.release()
            await publisher.flush()
            for number in range(30, 60):
                publisher.send(b"%d" % number)
            await publisher.flush()
        assert server.stored["a", 0] == [b"%d" % number for number in range(60)]


@in_both_loops
async def test_a_named_publisher_has_only_so_many_numbers_under_way_as_the_broker_remembers() -> (
    None
):
    async with FakeServer() as server, connect(server.url) as bus:
        async with bus.publisher("a", name="p", batch_messages_max=1) as publisher:
            server.hold_answers = True
            for number in range(300):
                publisher.send(b"%d" % number)
            await until(lambda: len(server.batches) == shard_sender.NUMBERED_MAX)
            for _ in range(20):
                await bus.ping()
            assert len(server.batches) == shard_sender.NUMBERED_MAX
            server.release(10)
            await until(lambda: len(server.batches) == shard_sender.NUMBERED_MAX + 10)
            server.hold_answers = False
            server.release()
            await publisher.flush()
        assert server.stored["a", 0] == [b"%d" % number for number in range(300)]
