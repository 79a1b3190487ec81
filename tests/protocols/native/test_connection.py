"""A connection's bytes, through the pipe: frames however they are cut, rubbish, silence, and one write per wake-up."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runnel.config import NativeSettings, Settings
from runnel.errors import BusyError
from runnel.formats import wire
from runnel.formats.frames import pack_head
from runnel.protocols.native.native_server import NativeServer
from runnel.protocols.native.pipe import PipeTransport, connect_pipe
from runnel.protocols.native.protocol import HELLO_BYTES_MAX, NativeConnection
from runnel.security.authenticator import Authenticator
from tests.protocols.native.fake_broker import FakeBroker
from tests.protocols.native.talker import (
    HELLO,
    Talker,
    in_loop,
    packed,
    publish,
    subscribe,
    turn,
    until,
)

SECOND_NS = 1_000_000_000
MIB = 2**20


class Scene:
    """A listener with a fake broker, and clients that come through pipes as if they were sockets."""

    def __init__(self, native: NativeSettings | None = None) -> None:
        self.broker = FakeBroker()
        settings = Settings(native=native or NativeSettings())
        authenticator = Authenticator.open(settings, self.broker.clock)
        self.server = NativeServer(self.broker.as_broker, settings, authenticator)

    def connect(self) -> Talker:
        talker = Talker()
        connect_pipe(asyncio.get_running_loop(), self.server.new_connection(), talker)
        return talker

    async def greeted(self) -> Talker:
        talker = self.connect()
        await talker.greet()
        return talker

    async def pass_time(self, seconds: float, step_seconds: float = 1.0) -> None:
        for _ in range(round(seconds / step_seconds)):
            self.broker.clock.advance(round(step_seconds * SECOND_NS))
            await turn()


@asynccontextmanager
async def opened(native: NativeSettings | None = None) -> AsyncIterator[Scene]:
    scene = Scene(native)
    try:
        yield scene
    finally:
        await scene.server.close()
        assert not scene.server.connections
        assert not scene.server.tasks


CONVERSATION = [packed(HELLO), packed(wire.Ping(2)), publish(3, b"x" * 50), packed(wire.Ping(4))]


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    for begin, end in pairwise([0, *cuts, len(data)]):
        yield data[begin:end]


async def _converse(scene: Scene, chunks: list[bytes]) -> None:
    talker = scene.connect()
    for chunk in chunks:
        talker.say(chunk)
        await turn(3)
    await turn()
    answers = [answer for answer, _ in talker.answers]
    assert [type(answer) for answer in answers] == [
        wire.Welcome,
        wire.Pong,
        wire.Published,
        wire.Pong,
    ]
    talker.transport.abort()


@in_loop
async def test_frames_may_be_split_at_every_byte() -> None:
    stream = b"".join(CONVERSATION)
    async with opened() as scene:
        await _converse(scene, [stream])
        await _converse(scene, [stream[at : at + 1] for at in range(len(stream))])
        for at in range(1, len(stream)):
            await _converse(scene, list(pieces(stream, [at])))
    assert set(scene.broker.published) == {b"x" * 50}


@in_loop
async def test_large_frames_come_whole_among_small_ones() -> None:
    async with opened() as scene:
        talker = await scene.greeted()
        payloads = [bytes([number]) * size for number, size in enumerate([10, 3 * MIB, 5, 700_000])]
        talker.say(*(publish(number + 2, payload) for number, payload in enumerate(payloads)))
        for number in range(4):
            assert (await talker.hear(wire.Published)).id == number + 2
        assert scene.broker.published == payloads


# --- Rubbish ---


@pytest.mark.parametrize(
    ("rubbish", "code", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "limit_exceeded", "a frame of 542393671 bytes"),
        (struct.pack("<II", 16 * MIB + 8, 8), "limit_exceeded", "at most 16777216"),
        (struct.pack("<II", 8, 0), "malformed", "a head of 0 bytes"),
        (struct.pack("<II", 8, 9), "malformed", "does not fit"),
        (pack_head(b"\xc1"), "malformed", "frame head"),
        (pack_head(b"\xd9\xff"), "malformed", "frame head"),
        (pack_head(b"\x91" * 5000), "malformed", "frame head"),
        (pack_head(b"\x92\xa4ping\xff"), "malformed", "frame head"),
    ],
)
@in_loop
async def test_rubbish_is_told_what_is_wrong_and_closed(
    rubbish: bytes, code: str, text: str
) -> None:
    async with opened() as scene:
        other, talker = await scene.greeted(), await scene.greeted()
        talker.say(rubbish, wire.Ping(9))
        (error,) = await talker.hear_end()
        assert isinstance(error, wire.Error)
        assert (error.id, error.code) == (0, code)
        assert text in error.text
        assert isinstance(await other.ask(wire.Ping(2), wire.Pong), wire.Pong)
        assert scene.broker.metrics.counters.protocol_errors == 1


class _Browser(asyncio.Protocol):
    """Speaks HTTP wherever it is."""

    def __init__(self) -> None:
        self.heard = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.heard += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


@pytest.mark.parametrize(
    "request_line",
    [
        *(f"{method} /v1/topics HTTP/1.1" for method in ("GET", "PUT", "POST", "HEAD", "DELETE")),
        "OPTIONS * HTTP/1.1",
        "PATCH / HTTP/1.1",
        "PRI * HTTP/2.0",
    ],
)
@in_loop
async def test_who_begins_with_http_is_told_in_http_where_it_is(request_line: str) -> None:
    async with opened() as scene:
        browser = _Browser()
        _, transport = connect_pipe(
            asyncio.get_running_loop(), scene.server.new_connection(), browser
        )
        transport.write(f"{request_line}\r\nhost: a\r\n\r\n".encode())
        await browser.ended
        head, _, body = browser.heard.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert body == b"this is Runnel's native listener; HTTP is usually at 7480\n"
        assert scene.broker.metrics.counters.protocol_errors == 1


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.binary(min_size=1, max_size=30).map(pack_head),
            st.recursive(
                st.none()
                | st.integers(-(2**31), 2**63)
                | st.text(max_size=5)
                | st.binary(max_size=5),
                lambda inner: st.lists(inner, max_size=6),
                max_leaves=10,
            ).map(lambda value: pack_head(msgspec.msgpack.encode(value))),
            st.sampled_from(CONVERSATION).map(lambda frame: frame[:-3] + b"\xff\x00\x01"),
            st.sampled_from(CONVERSATION),
        ),
        max_size=6,
    ),
    st.booleans(),
)
@settings(max_examples=150)
def test_whatever_one_client_sends_others_do_not_notice(chunks: list[bytes], greets: bool) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        failures: list[object] = []
        loop.set_exception_handler(lambda _, context: failures.append(context))
        async with opened() as scene:
            other, vandal = await scene.greeted(), scene.connect()
            if greets:
                vandal.say(HELLO)
            for chunk in chunks:
                if not vandal.transport.is_closing():
                    vandal.say(chunk)
                await turn(4)
            assert isinstance(await other.ask(wire.Ping(2), wire.Pong), wire.Pong)
            assert all(
                answer.code != "internal"
                for answer, _ in vandal.answers
                if isinstance(answer, wire.Error)
            )
        assert not failures

    asyncio.run(scenario())


# --- Time ---


@in_loop
async def test_who_does_not_say_hello_in_time_is_told_so_and_closed() -> None:
    async with opened() as scene:
        silent, slow = scene.connect(), scene.connect()
        for byte in packed(HELLO)[:8]:
            slow.say(bytes([byte]))
            await scene.pass_time(1.0)
        for talker in (silent, slow):
            (error,) = await talker.hear_end()
            assert isinstance(error, wire.Error)
            assert (error.id, error.code) == (0, "handshake")
            assert "5s" in error.text


@in_loop
async def test_who_is_silent_for_too_long_is_closed_and_who_pings_is_not() -> None:
    async with opened(NativeSettings(idle_timeout_ns=10 * SECOND_NS)) as scene:
        silent, pinging = await scene.greeted(), await scene.greeted()
        for number in range(5):
            await scene.pass_time(4)
            await pinging.ask(wire.Ping(number), wire.Pong)
        (error,) = await silent.hear_end()
        assert isinstance(error, wire.Error)
        assert (error.code, error.retriable) == ("timeout", True)
        assert "10s" in error.text
        assert scene.broker.metrics.counters.connections_idle == 1
        assert not pinging.lost.done()


@in_loop
async def test_who_has_to_wait_for_the_broker_is_not_silent() -> None:
    async with opened(NativeSettings(idle_timeout_ns=10 * SECOND_NS)) as scene:
        talker = await scene.greeted()
        scene.broker.refusals = [BusyError("full")]
        talker.say(publish(2, b"1"))
        await scene.pass_time(60)
        scene.broker.room.set()
        assert (await talker.hear(wire.Published)).id == 2


@in_loop
async def test_who_reads_nothing_of_what_it_is_sent_is_closed_at_last() -> None:
    async with opened(NativeSettings(idle_timeout_ns=10 * SECOND_NS)) as scene:
        talker = await scene.greeted()
        await talker.ask(subscribe(2), wire.Subscribed)
        talker.transport.pause_reading()
        (subscription,) = scene.broker.subscriptions
        while "pause" not in subscription.calls:
            subscription.deliver(bytes(MIB))
            await turn()
        await scene.pass_time(20)
        assert subscription.calls[-1] == "close"
        assert not scene.server.connections


@in_loop
async def test_clients_within_the_process_may_be_silent_for_ever() -> None:
    async with opened() as scene:
        talker = Talker()
        scene.server.connect(talker)
        await scene.pass_time(1000, 10)
        await talker.greet()
        await scene.pass_time(1000, 10)
        assert isinstance(await talker.ask(wire.Ping(2), wire.Pong), wire.Pong)


# --- Flow ---


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every write of the listener, from now on."""
    sizes: list[int] = []
    write = PipeTransport.writelines

    def recording(self: PipeTransport, list_of_data: Iterable[bytes]) -> None:
        pieces = list(list_of_data)
        if isinstance(self.get_protocol(), NativeConnection):
            sizes.append(sum(map(len, pieces)))
        write(self, pieces)

    monkeypatch.setattr(PipeTransport, "writelines", recording)
    return sizes


@in_loop
async def test_what_follows_a_first_delivery_in_a_wake_up_is_one_write(writes: list[int]) -> None:
    async with opened() as scene:
        talker = await scene.greeted()
        await talker.ask(subscribe(2), wire.Subscribed)
        writes.clear()
        (subscription,) = scene.broker.subscriptions
        for _ in range(20):
            subscription.deliver(bytes(1000))
            assert len(writes) == 1  # the first, at once
        talker.say(*(wire.Ping(number) for number in range(3, 10)))
        await turn()
        assert len(talker.answers) == 27
        assert len(writes) == 3  # the other deliveries in one turn, the answers in the next
        assert writes[0] < 2000
        assert writes[1] > 19_000


@in_loop
async def test_who_is_behind_gathers_first_deliveries_too(writes: list[int]) -> None:
    async with opened() as scene:
        reader, publisher = await scene.greeted(), await scene.greeted()
        await reader.ask(subscribe(2), wire.Subscribed)
        scene.broker.delivers_publishes = True
        for count, expected in ((1, 2), (5, 2), (1, 2)):
            writes.clear()
            publisher.say(*(publish(number, bytes(1000)) for number in range(3, 3 + count)))
            await turn()
            assert len(writes) == expected  # to the reader, to the publisher
            assert (max(writes) > 5000) is (count == 5)
        assert len(reader.answers) == len(publisher.answers) == 7


@in_loop
async def test_a_slow_client_pauses_its_subscriptions_until_it_has_read() -> None:
    async with opened() as scene:
        talker = await scene.greeted()
        await talker.ask(subscribe(2), wire.Subscribed)
        (subscription,) = scene.broker.subscriptions
        talker.transport.pause_reading()
        delivered = 0
        while "pause" not in subscription.calls:
            subscription.deliver(bytes(100_000))
            delivered += 1
            await turn()
        assert delivered * 100_000 < 4 * MIB
        talker.say(wire.Ping(3))
        await turn()
        talker.transport.resume_reading()
        await until(lambda: len(talker.answers) == delivered + 1)
        assert subscription.calls == ["start", "pause", "resume"]
        assert isinstance(talker.answers[-1][0], wire.Pong)


@in_loop
async def test_a_client_whose_publishes_wait_cannot_send_on_without_end() -> None:
    async with opened() as scene:
        talker = await scene.greeted()
        scene.broker.refusals = [BusyError("full")]
        sent = 0
        while talker.can_write:
            talker.say(publish(sent + 2, bytes(100_000)))
            sent += 1
            await turn()
        assert sent * 100_000 < 4 * MIB
        scene.broker.room.set()
        for number in range(sent):
            assert (await talker.hear(wire.Published)).id == number + 2
        assert talker.can_write


@in_loop
async def test_a_client_that_closes_its_side_still_gets_its_answers() -> None:
    async with opened() as scene:
        talker = await scene.greeted()
        scene.broker.holds_publishes = True
        talker.say(publish(2, b"1"))
        talker.transport.write_eof()
        await turn()
        scene.broker.answer(scene.broker.pending[0])
        (published,) = await talker.hear_end()
        assert isinstance(published, wire.Published)


# --- Before hello ---


@in_loop
async def test_a_first_frame_that_is_no_hello_by_its_length_is_refused_before_it_comes() -> None:
    async with opened() as scene:
        talker = scene.connect()
        talker.say(struct.pack("<II", HELLO_BYTES_MAX + 8, 100))
        (error,) = await talker.hear_end()
        assert isinstance(error, wire.Error)
        assert error.code == "limit_exceeded"
        assert f"at most {HELLO_BYTES_MAX} are allowed" in error.text


@in_loop
async def test_a_hello_may_be_long_and_what_follows_in_the_same_breath_longer() -> None:
    async with opened() as scene:
        talker = scene.connect()
        hello = packed(wire.Hello(1, 1, (), "c" * 4000))
        talker.say(hello + publish(2, b"x" * 100_000) + packed(wire.Ping(3)))
        await talker.hear(wire.Welcome)
        heard = {type((await talker.hear_all())[0]) for _ in range(2)}
        assert heard == {wire.Published, wire.Pong}


# --- Number and end ---


@in_loop
async def test_one_connection_more_than_allowed_is_told_so_and_closed() -> None:
    async with opened(NativeSettings(connections_max=2)) as scene:
        first, _ = await scene.greeted(), await scene.greeted()
        third = scene.connect()
        third.say(HELLO)
        (error,) = await third.hear_end()
        assert isinstance(error, wire.Error)
        assert (error.id, error.code, error.retriable) == (0, "busy", True)
        assert scene.broker.metrics.counters.connections_refused == 1
        first.transport.close()
        await turn()
        await (await scene.greeted()).ask(wire.Ping(2), wire.Pong)


@in_loop
async def test_who_has_been_silent_for_longest_makes_room() -> None:
    async with opened(NativeSettings(connections_max=3)) as scene:
        admitted = await scene.greeted()
        silent = [scene.connect() for _ in range(2)]
        silent[1].say(packed(HELLO)[:20])  # a part of a hello is none
        await turn()
        newcomers = [await scene.greeted() for _ in range(2)]
        for stranger in silent:
            assert await stranger.hear_end() == []
        assert scene.broker.metrics.counters.connections_idle == 2
        assert scene.broker.metrics.counters.connections_refused == 0
        for client in (admitted, *newcomers):
            await client.ask(wire.Ping(2), wire.Pong)
        assert scene.server.connection_count == 3


@in_loop
async def test_draining_answers_all_publishes_before_it_closes_anybody() -> None:
    async with opened() as scene:
        publisher, subscriber, fetcher = [await scene.greeted() for _ in range(3)]
        await subscriber.ask(subscribe(2), wire.Subscribed)
        scene.broker.holds_publishes = True
        publisher.say(publish(2, b"1"))
        fetcher.say(wire.Fetch(2, "a", wait_ms=60_000))
        await turn()
        draining = asyncio.get_running_loop().create_task(scene.server.drain())
        await turn()
        for talker in (publisher, subscriber, fetcher):
            assert (await talker.hear(wire.Closing)).within_ms == 10_000
        assert (await fetcher.hear(wire.Error)).code == "closed"
        late = scene.connect()
        (refusal,) = await late.hear_end()
        assert isinstance(refusal, wire.Error)
        assert (refusal.code, refusal.retriable) == ("closed", True)
        assert not draining.done()
        scene.broker.subscriptions[0].deliver(b"12345678")
        scene.broker.answer(scene.broker.pending[0])
        assert await draining
        assert [type(answer) for answer in await publisher.hear_end()] == [wire.Published]
        assert [type(answer) for answer in await subscriber.hear_end()] == [wire.Deliver]
        assert await fetcher.hear_end() == []


@pytest.mark.parametrize("hurries", [False, True])
@in_loop
async def test_draining_ends_at_its_deadline_or_when_hurried(hurries: bool) -> None:
    async with opened() as scene:
        talker = await scene.greeted()
        scene.broker.holds_publishes = True
        talker.say(publish(2, b"1"))
        await turn()
        draining = asyncio.get_running_loop().create_task(scene.server.drain())
        await scene.pass_time(9)
        assert not draining.done()
        if hurries:
            scene.server.hurry()
        else:
            await scene.pass_time(2)
        assert not await draining
        await scene.server.close()
        await talker.lost


@in_loop
async def test_connections_are_counted_for_the_metrics() -> None:
    async with opened() as scene:
        talker = await scene.greeted()
        talker.say(publish(2, b"1"), subscribe(3))
        await turn()
        scene.broker.subscriptions[0].deliver(b"12345678")
        await turn()
        (row,) = scene.broker.rows()
        assert (row.listener, row.peer, row.client, row.subscriptions) == (
            "native",
            "in-process",
            "test",
            1,
        )
        assert (row.flow.messages_in, row.flow.messages_out) == (1, 1)
        assert row.flow.bytes_in > 8
        assert row.flow.bytes_out > 8
    assert scene.broker.connections.listeners == []
