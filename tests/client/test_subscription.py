"""Live subscriptions: the messages of a reader, their order, and resuming after a lost connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone

import pytest

from runnel.client import Gap, connect
from runnel.client.consumer import StartAt, start_of
from runnel.errors import ClientFault, InvalidNameError, SlowReaderError, TimeoutExpiredError
from runnel.formats import wire
from tests.client.fake_server import FakeServer, Peer, refusing, silent, stored_batch
from tests.client.running import FakeTimers, in_both_loops, until


def beginning_at(
    *, shards: Sequence[wire.ShardPlace] = (), partitions: Sequence[wire.PartitionPlace] = ()
) -> Callable[[Peer, wire.Subscribe, memoryview], None]:
    def subscribed(peer: Peer, request: wire.Subscribe, tail: memoryview) -> None:
        peer.say(wire.Subscribed(request.id, request.subscription, partitions, shards))

    return subscribed


# --- Reading ---


@in_both_loops
async def test_messages_come_in_order_without_a_task_or_wait_for_each() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a") as subscription,
    ):
        server.peer.deliver(1, [stored_batch("a", 1, [b"1", b"2"])], next_entry=2)
        server.peer.deliver(1, [stored_batch("a", 3, [b"3"])], next_entry=3)
        received = []
        async for message in subscription:
            received.append((message.offset, message.payload))
            if message.offset == 3:
                break
        assert received == [(1, b"1"), (2, b"2"), (3, b"3")]


@in_both_loops
async def test_a_loop_that_was_broken_off_can_go_on() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a") as subscription,
    ):
        batches = [stored_batch("a", 1, [b"1", b"2", b"3"]), stored_batch("a", 4, [b"4"])]
        server.peer.deliver(1, batches, next_entry=2)
        async for message in subscription:
            assert message.payload == b"1"
            break
        assert (await anext(subscription)).payload == b"2"
        rest = []
        async for message in subscription:
            rest.append(message.payload)
            if message.payload == b"4":
                break
        assert rest == [b"3", b"4"]


@in_both_loops
async def test_batches_and_record_batches() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        subscription = bus.subscribe("a")
        await subscription.open()
        server.peer.deliver(1, [stored_batch("a", 1, [b"1", b"2"])], next_entry=2)
        async for batch in subscription.batches():
            assert [message.payload for message in batch] == [b"1", b"2"]
            break
        server.peer.deliver(1, [stored_batch("a", 3, [b"3"])], next_entry=2)
        async for table in subscription.to_arrow():
            assert table.column("payload").to_pylist() == [b"3"]
            break
        await subscription.close()


@in_both_loops
async def test_the_first_step_subscribes() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        subscription = bus.subscribe("a", "b/*", start="last", overflow="newest_per_topic")
        assert not server.asked(wire.Subscribe)
        reading = asyncio.ensure_future(anext(subscription))
        await until(lambda: server.asked(wire.Subscribe))
        (asked,) = server.asked(wire.Subscribe)
        assert (list(asked.patterns), asked.start.kind, asked.overflow) == (
            ["a", "b/*"],
            "last",
            "newest_per_topic",
        )
        server.peer.deliver(1, [stored_batch("a", 1, [b"1"])], next_entry=2)
        assert (await reading).payload == b"1"


@in_both_loops
async def test_a_second_reader_at_the_same_time_is_refused() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a") as subscription,
    ):
        reading = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        with pytest.raises(ClientFault, match="another reader"):
            await anext(subscription)
        server.peer.deliver(1, [stored_batch("a", 1, [b"1", b"2"])], next_entry=2)
        assert (await reading).payload == b"1"
        assert (await anext(subscription)).payload == b"2"


@in_both_loops
async def test_a_reader_that_always_finds_something_lets_others_run() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a") as subscription,
    ):
        batches = [stored_batch("a", n + 1, [bytes(100_000)]) for n in range(20)]
        server.peer.deliver(1, batches, next_entry=2)
        for batch in batches:
            server.peer.deliver(1, [batch], next_entry=2)
        await until(lambda: len(subscription._arrived) == 21)
        turns = 0

        def count() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(count)

        count()
        for _ in range(40):
            await anext(subscription)
        assert turns > 5
        await asyncio.sleep(0)


# --- Credit ---


@in_both_loops
async def test_credit_is_returned_in_quarters_of_the_buffer() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a", buffer_bytes=100_000) as subscription,
    ):
        assert [s.credit_bytes for s in server.asked(wire.Subscribe)] == [100_000]
        sizes = []
        for number in range(10):
            batch = stored_batch("a", number + 1, [bytes(9_000)])
            sizes.append(len(batch.pack()))
            server.peer.deliver(1, [batch], next_entry=number + 2)
        for _ in range(10):
            await anext(subscription)
        await bus.ping()
        granted = [credit.credit_bytes for credit in server.asked(wire.Credit)]
        assert granted == [sum(sizes[:3]), sum(sizes[3:6]), sum(sizes[6:9])]


@in_both_loops
async def test_what_is_not_read_yet_counts_against_the_credit_of_a_new_connection() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a", buffer_bytes=100_000) as subscription,
    ):
        batch = stored_batch("a", 1, [bytes(50_000)])
        server.peer.deliver(1, [batch], next_entry=2)
        await until(lambda: subscription._held_bytes)
        server.drop()
        await until(lambda: len(server.asked(wire.Subscribe)) == 2)
        assert server.asked(wire.Subscribe)[1].credit_bytes == 100_000 - len(batch.pack())


# --- Resuming ---


@in_both_loops
async def test_a_pattern_resumes_by_shard_behind_what_has_arrived() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Subscribe, beginning_at(shards=[wire.ShardPlace("main", 0, 1, 5)]))
        async with bus.subscribe("a*") as subscription:
            server.peer.deliver(1, [stored_batch("a1", 7, [b"7"], entry=5)], next_entry=6)
            server.peer.deliver(1, [stored_batch("a1", 8, [b"8"], entry=6)], next_entry=7)
            await until(lambda: len(subscription._arrived) == 2)
            server.drop()
            await until(lambda: len(server.asked(wire.Subscribe)) == 2)
            resumed = server.asked(wire.Subscribe)[1].start
            assert (resumed.kind, list(resumed.shards)) == (
                "resume",
                [wire.ShardPlace("main", 0, 1, 7)],
            )
            server.peer.deliver(1, [stored_batch("a1", 9, [b"9"], entry=7)], next_entry=8)
            assert [(await anext(subscription)).payload for _ in range(3)] == [b"7", b"8", b"9"]


@in_both_loops
async def test_named_topics_resume_by_partition_also_those_made_later() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        places = [wire.PartitionPlace("a", 0, 7, 1), wire.PartitionPlace("a", 1, 3, 1)]
        server.on(wire.Subscribe, beginning_at(partitions=places))
        async with bus.subscribe("a", "later") as subscription:
            server.peer.deliver(1, [stored_batch("a", 7, [b"7", b"8"])], next_entry=0)
            server.peer.deliver(1, [stored_batch("later", 1, [b"1"])], next_entry=9)
            await until(lambda: len(subscription._arrived) == 2)
            server.drop()
            await until(lambda: len(server.asked(wire.Subscribe)) == 2)
            assert set(server.asked(wire.Subscribe)[1].start.partitions) == {
                wire.PartitionPlace("a", 0, 9, 1),
                wire.PartitionPlace("a", 1, 3, 1),
                wire.PartitionPlace("later", 0, 2, 1),
            }


@in_both_loops
async def test_a_reader_that_is_cut_off_among_last_values_asks_for_the_others() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Subscribe, beginning_at(shards=[wire.ShardPlace("main", 0, 1, 5)]))
        async with bus.subscribe("a*", start="last") as subscription:
            server.peer.deliver(1, [stored_batch("a1", 7, [b"7"], entry=3)], next_entry=0)
            assert (await anext(subscription)).payload == b"7"
            server.drop()
            await until(lambda: len(server.asked(wire.Subscribe)) == 2)
            assert server.asked(wire.Subscribe)[1].start == wire.Start(
                "resume_last", [], 0, [wire.ShardPlace("main", 0, 1, 5)]
            )
            again = [stored_batch("a1", 7, [b"7"], entry=3), stored_batch("a2", 3, [b"3"], entry=4)]
            server.peer.deliver(1, again, next_entry=0)
            assert (await anext(subscription)).payload == b"3"  # the first came before


@in_both_loops
async def test_a_reader_that_has_all_last_values_does_not_ask_for_them_again() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a", start="last") as subscription,
    ):
        server.peer.deliver(1, [stored_batch("a", 7, [b"7"])], next_entry=0)
        server.peer.deliver(1, [], next_entry=0)
        await until(lambda: len(subscription._arrived) == 2)
        server.drop()
        await until(lambda: len(server.asked(wire.Subscribe)) == 2)
        assert server.asked(wire.Subscribe)[1].start.kind == "resume"


@in_both_loops
async def test_last_values_that_come_again_give_their_credit_back() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        value = stored_batch("a", 7, [bytes(1000)])
        async with bus.subscribe("a", start="last", buffer_bytes=1000) as subscription:
            server.peer.deliver(1, [value], next_entry=0)
            await anext(subscription)
            server.drop()
            await until(lambda: len(server.asked(wire.Subscribe)) == 2)
            waiting = asyncio.ensure_future(anext(subscription))
            server.peer.deliver(1, [value], next_entry=0)
            await until(lambda: server.asked(wire.Credit))
            server.peer.deliver(1, [stored_batch("a", 8, [b"8"])], next_entry=9)
            assert (await waiting).payload == b"8"


@in_both_loops
async def test_a_connection_lost_before_the_answer_begins_from_the_start() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Subscribe, silent)
        opening = asyncio.ensure_future(bus.subscribe("a", start="earliest").open())
        await until(lambda: server.asked(wire.Subscribe))
        server.usual(wire.Subscribe)
        server.drop()
        await opening
        assert [s.start.kind for s in server.asked(wire.Subscribe)] == ["earliest"] * 2


@in_both_loops
async def test_a_broker_that_ends_it_on_its_way_out_is_asked_again() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a") as subscription,
    ):
        server.peer.say(wire.Ended(1, "closed", "shutting down", retriable=True))
        await until(lambda: len(server.asked(wire.Subscribe)) == 2)
        server.peer.deliver(1, [stored_batch("a", 1, [b"1"])], next_entry=2)
        assert (await anext(subscription)).payload == b"1"


@in_both_loops
async def test_a_subscription_follows_its_topic_to_another_node() -> None:
    async with FakeServer() as first, FakeServer() as second, connect(first.url) as bus:
        routes = [wire.Route("a", "disk", [wire.Owner("main", 0, 2, second.address)])]

        def moved(peer: Peer, request: wire.Subscribe, tail: memoryview) -> None:
            peer.say(wire.Error(request.id, "moved", "to node 2", retriable=True, routes=routes))

        first.on(wire.Subscribe, moved)
        async with bus.subscribe("a") as subscription:
            second.peer.deliver(1, [stored_batch("a", 1, [b"1"])], next_entry=2)
            assert (await anext(subscription)).payload == b"1"


# --- Gaps and the end ---


@in_both_loops
async def test_a_gap_is_told_before_what_comes_after_it() -> None:
    order: list[object] = []
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a", on_gap=order.append) as subscription,
    ):
        gap = Gap("overflow", 3, "a", 0, 2, 5)
        server.peer.deliver(1, [stored_batch("a", 1, [b"1"])], next_entry=2)
        server.peer.say(wire.GapNotice(1, gap))
        server.peer.deliver(1, [stored_batch("a", 5, [b"5"])], next_entry=2)
        order.append((await anext(subscription)).payload)
        order.append((await anext(subscription)).payload)
        assert order == [b"1", gap, b"5"]
        assert list(subscription.gaps) == [gap]


@in_both_loops
async def test_gaps_that_nobody_reads_are_added_up() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a") as subscription,
    ):
        for number in range(3000):
            server.peer.say(wire.GapNotice(1, Gap("overflow", 2, f"t{number}")))
        server.peer.deliver(1, [stored_batch("a", 1, [b"1"])], next_entry=2)
        await until(lambda: subscription._held_bytes)
        assert len(subscription._arrived) < 1010
        missed = 0

        def count(gap: Gap) -> None:
            nonlocal missed
            missed += gap.missed

        subscription._on_gap = count
        await anext(subscription)
        assert missed == 6000


@in_both_loops
async def test_a_subscription_that_the_broker_ends_raises_why_after_what_arrived() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a", overflow="disconnect") as subscription,
    ):
        server.peer.deliver(1, [stored_batch("a", 1, [b"1"])], next_entry=2)
        server.peer.say(wire.Ended(1, "slow_reader", "too slow", retriable=True))
        assert (await anext(subscription)).payload == b"1"
        for _ in range(2):
            with pytest.raises(SlowReaderError, match="too slow"):
                await anext(subscription)


@in_both_loops
async def test_a_refused_subscription_raises_when_it_is_entered() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Subscribe, refusing("invalid_name", retriable=False))
        with pytest.raises(InvalidNameError):
            async with bus.subscribe("a"):
                pass
        with pytest.raises(InvalidNameError):
            async for _ in bus.subscribe("a"):
                pass


@in_both_loops
async def test_a_subscription_that_is_given_up_while_it_is_entered_is_no_burden_to_the_broker() -> (
    None
):
    async with FakeServer() as server, connect(server.url) as bus:
        server.on(wire.Subscribe, silent)
        entering = asyncio.ensure_future(bus.subscribe("a").__aenter__())
        await until(lambda: server.asked(wire.Subscribe))
        entering.cancel()
        await asyncio.wait((entering,))
        await until(lambda: server.asked(wire.Unsubscribe))
        assert not bus._subscriptions


@in_both_loops
async def test_closing_ends_the_iteration() -> None:
    async with FakeServer() as server, connect(server.url) as bus:
        subscription = bus.subscribe("a")

        async def read() -> int:
            return len([message async for message in subscription])

        reading = asyncio.ensure_future(read())
        await until(lambda: server.asked(wire.Subscribe))
        await subscription.open()
        server.peer.deliver(1, [stored_batch("a", 1, [b"1"])], next_entry=2)
        await until(lambda: subscription._consumed_bytes)
        await subscription.close()
        assert await reading == 1
        assert len(server.asked(wire.Unsubscribe)) == 1
        assert not server.peer.transport.is_closing()


@in_both_loops
async def test_closing_the_bus_ends_the_iteration() -> None:
    async with FakeServer() as server:
        async with connect(server.url) as bus:
            subscription = bus.subscribe("a")
            reading = asyncio.ensure_future(anext(subscription))
            await until(lambda: server.asked(wire.Subscribe))
        with pytest.raises(StopAsyncIteration):
            await reading


@in_both_loops
async def test_a_cancelled_reader_leaves_nothing_behind() -> None:
    async with (
        FakeServer() as server,
        connect(server.url) as bus,
        bus.subscribe("a") as subscription,
    ):
        reading = asyncio.ensure_future(anext(subscription))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))
        assert not subscription._waiting
        server.peer.deliver(1, [stored_batch("a", 1, [b"1"])], next_entry=2)
        assert (await anext(subscription)).payload == b"1"


@in_both_loops
async def test_a_reader_without_a_connection_gives_up_after_the_deadline() -> None:
    timers = FakeTimers()
    async with (
        FakeServer() as server,
        connect(server.url, timers=timers, deadline_s=5) as bus,
        bus.subscribe("a") as subscription,
    ):
        await server.stop()
        reading = asyncio.ensure_future(anext(subscription))
        await timers.advance_until(reading.done)
        with pytest.raises(TimeoutExpiredError, match=f"not connected to {server.address}"):
            await reading


# --- Starts ---


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("latest", wire.Start("latest")),
        ("last", wire.Start("last")),
        ("earliest", wire.Start("earliest")),
        (7, wire.Start("offsets", (wire.PartitionPlace("a", 0, 7),))),
        ({"a": 7}, wire.Start("offsets", (wire.PartitionPlace("a", 0, 7),))),
        ({("a", 2): 7}, wire.Start("offsets", (wire.PartitionPlace("a", 2, 7),))),
        (("time", 5), wire.Start("time", time_ns=5)),
        (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), wire.Start("time", time_ns=10**9)),
        (
            datetime(1970, 1, 1, 1, 0, 0, 1, tzinfo=timezone(timedelta(hours=1))),
            wire.Start("time", time_ns=1000),
        ),
    ],
)
def test_starts_as_users_write_them(start: StartAt, expected: wire.Start) -> None:
    assert start_of(start, ["a"]) == expected


@pytest.mark.parametrize(
    ("start", "patterns"),
    [
        ("newest", ["a"]),
        (7, ["a/*"]),
        (7, ["a", "b"]),
        (True, ["a"]),
        (-1, ["a"]),
        ({1: 2}, ["a"]),
        ({"a": "b"}, ["a"]),
        (("when", 5), ["a"]),
        ({"a": 2**70}, ["a"]),
        ({("a", 2**70): 1}, ["a"]),
        ({"a\ud800": 1}, ["a"]),
        (2**70, ["a"]),
        (("time", 2**70), ["a"]),
        (datetime(9999, 1, 1, tzinfo=UTC), ["a"]),
        (datetime(2024, 1, 1), ["a"]),  # noqa: DTZ001 - that is the point
    ],
)
def test_starts_that_make_no_sense_are_refused(start: StartAt, patterns: list[str]) -> None:
    with pytest.raises(ClientFault):
        start_of(start, patterns)
