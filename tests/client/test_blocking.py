"""The client without `await`: the same verbs, from any thread."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from runnel.client import connect_blocking
from runnel.errors import ClosedError, LimitExceededError, Unavailable
from runnel.formats import wire
from tests.client.fake_server import FakeServer, Peer, refusing, stored_batch


class ServerThread:
    """A fake server on a loop of its own, as another process would be."""

    def __init__(self, server: FakeServer | None = None) -> None:
        self.server = server or FakeServer()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self.server.start())

    def run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)  # type: ignore[arg-type]

    def do(self, action: object, *args: object) -> None:
        self._loop.call_soon_threadsafe(action, *args)  # type: ignore[arg-type]

    def stop(self) -> None:
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def thread() -> Iterator[ServerThread]:
    thread = ServerThread()
    yield thread
    thread.stop()


@pytest.fixture
def server(thread: ServerThread) -> FakeServer:
    return thread.server


def test_the_verbs_are_the_same(server: FakeServer) -> None:
    server.on(wire.Fetch, lambda peer, r, _: peer.say(wire.Fetched(r.id, 1, 1, 1)))
    with connect_blocking(server.url) as bus:
        assert bus.publish("a", b"1", key=b"k").offset == 1
        assert bus.fetch("a", 1).messages == []
        assert bus.ping() > 0
        assert bus.server.node == "node-1"
        bus.set_cursor("c", {"a": 1})
    assert server.stored == {("a", 0): [b"1"]}


def test_a_publisher_flushes_at_its_end(server: FakeServer) -> None:
    with connect_blocking(server.url) as bus:
        with bus.publisher("a") as publisher:
            for number in range(5000):
                publisher.send(b"%d" % number)
        assert server.stored["a", 0] == [b"%d" % number for number in range(5000)]
        assert len(server.batches) < 50


def test_many_threads_share_a_publisher(server: FakeServer) -> None:
    with connect_blocking(server.url) as bus, bus.publisher("a") as publisher:

        def send_some(thread: int) -> None:
            for number in range(1000):
                publisher.send(b"%d %d" % (thread, number))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send_some, range(4)))
        publisher.flush()
        stored = [tuple(map(int, payload.split())) for payload in server.stored["a", 0]]
        for thread in range(4):
            assert [n for t, n in stored if t == thread] == list(range(1000))


def test_sending_blocks_while_the_buffer_is_full(thread: ServerThread, server: FakeServer) -> None:
    server.hold_answers = True
    with connect_blocking(server.url) as bus:
        publisher = bus.publisher("a", buffer_bytes_max=50_000)
        sent: list[int] = []

        def send_much() -> None:
            for number in range(200):
                publisher.send(bytes(1000))
                sent.append(number)

        sender = threading.Thread(target=send_much)
        sender.start()
        while not server.batches:
            sender.join(0.01)
        sender.join(0.05)
        assert sender.is_alive()
        assert len(sent) < 200
        server.hold_answers = False
        thread.do(server.release)
        sender.join(10)
        assert not sender.is_alive()
        publisher.close()
        assert len(server.stored["a", 0]) == 200


def test_futures_and_failures(server: FakeServer) -> None:
    with connect_blocking(server.url) as bus:
        publisher = bus.publisher("a", name="p")
        assert publisher.submit(b"1").result(10).offset == 1
        server.on(wire.Publish, refusing("limit_exceeded", retriable=False))
        with pytest.raises(LimitExceededError):
            publisher.submit(b"2").result(10)
        publisher.send(b"3")
        with pytest.raises(LimitExceededError):
            publisher.flush()
        server.usual(wire.Publish)
        publisher.close()
        with pytest.raises(ClosedError):
            publisher.send(b"4")


def test_iterating_a_subscription(thread: ServerThread, server: FakeServer) -> None:
    def deliver(peer: Peer, request: wire.Subscribe, tail: memoryview) -> None:
        server.react_usually(peer, request, tail)
        number = request.subscription
        peer.deliver(number, [stored_batch("a", 1, [b"1", b"2", b"3"])], next_entry=2)
        peer.deliver(number, [stored_batch("a", 4, [b"4"])], next_entry=3)

    server.on(wire.Subscribe, deliver)
    with connect_blocking(server.url) as bus:
        with bus.subscribe("a") as subscription:
            for message in subscription:
                assert message.payload == b"1"
                break
            rest = []
            for message in subscription:
                rest.append(message.payload)
                if message.payload == b"4":
                    break
            assert rest == [b"2", b"3", b"4"]
        with bus.subscribe("a", start="earliest") as subscription:
            assert len(next(subscription.batches())) == 3
            assert next(iter(subscription.to_arrow())).num_rows == 1
            threading.Timer(0.01, subscription.close).start()
            assert list(subscription) == []


def test_it_works_where_a_loop_is_running_already(server: FakeServer) -> None:
    async def cell_of_a_notebook() -> int:
        with connect_blocking(server.url) as bus:
            return bus.publish("a", b"1").offset

    assert asyncio.run(cell_of_a_notebook()) == 1


def test_a_broker_that_is_not_there_leaves_no_thread(server: FakeServer) -> None:
    before = threading.active_count()
    with pytest.raises(Unavailable, match="runnel serve"):
        connect_blocking("runnel://127.0.0.1:1")
    assert threading.active_count() == before


def test_a_closed_bus_says_so(server: FakeServer) -> None:
    bus = connect_blocking(server.url)
    bus.close()
    bus.close()
    with pytest.raises(ClosedError):
        bus.ping()


def test_a_forgotten_bus_warns_and_ends_its_thread(server: FakeServer) -> None:
    bus = connect_blocking(server.url)
    with pytest.warns(ResourceWarning, match="never closed"):  # noqa: PT031
        del bus
        gc.collect()


def test_what_was_sent_before_the_program_ends_is_published(server: FakeServer) -> None:
    program = textwrap.dedent(
        f"""
        from runnel.client import connect_blocking
        bus = connect_blocking({server.url!r})
        publisher = bus.publisher("a")
        publisher.send(b"1")
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
    assert server.stored == {("a", 0): [b"1"]}
