"""The line that tasks read over, and the client that takes its place: the same rows, whatever becomes of either."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from runnel.client import BlockingBus
from runnel.errors import Unavailable
from runnel.formats import wire
from runnel.formats.message import Message
from runnel.spark.connections import BrokerLogin, close_connections
from runnel.spark.read import page_connection as page_connections
from runnel.spark.read.page_connection import (
    PageConnection,
    PageConnectionError,
    close_page_connections,
    page_connection,
)
from runnel.spark.read.ranges import Range, ShardRange, TopicRange, read
from tests.spark.brokers import DiskBroker

COUNT = 60_000  # in several pages


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    close_page_connections()
    close_connections()


def fill(bus: BlockingBus) -> None:
    with bus.publisher("a") as publisher:
        for number in range(COUNT):
            publisher.send(b"%099d" % number, event_time_ns=number)


def topic_range(broker: DiskBroker, begin: int = 1, end: int = COUNT + 1) -> TopicRange:
    return TopicRange(address=BrokerLogin(broker.url), topic="a", partition=0, begin=begin, end=end)


def messages(work: Range) -> list[Message]:
    return [message for batch in read(work) for message in batch]


def through_client(work: Range, monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    def none(_: BrokerLogin) -> PageConnection:
        raise PageConnectionError("not today")

    with monkeypatch.context() as patched:
        patched.setattr("runnel.spark.read.ranges.page_connection", none)
        return messages(work)


def test_a_line_brings_what_a_client_does(
    broker: DiskBroker, bus: BlockingBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bus)
    topic = topic_range(broker, 4321, COUNT - 1234)
    found = messages(topic)
    assert [message.offset for message in found] == list(range(4321, COUNT - 1234))
    assert found == through_client(topic, monkeypatch)
    (state,) = bus.shards("a")
    shard = ShardRange(
        address=BrokerLogin(broker.url),
        journal=state.journal,
        shard=state.shard,
        epoch=state.epoch,
        begin=state.first_entry,
        end=state.next_entry,
        patterns=("a",),
    )
    found = messages(shard)
    assert len(found) == COUNT
    assert found == through_client(shard, monkeypatch)


def test_a_worker_keeps_its_line_until_a_reader_leaves_it_halfway(
    broker: DiskBroker, bus: BlockingBus
) -> None:
    fill(bus)
    address = BrokerLogin(broker.url)
    messages(topic_range(broker))
    kept = page_connection(address)
    messages(topic_range(broker))
    assert page_connection(address) is kept
    reading = read(topic_range(broker))
    first = next(iter(islice(reading, 1)))
    assert first.runs()[0].base_offset == 1
    reading.close()  # type: ignore[attr-defined]
    assert page_connection(address) is not kept
    assert len(messages(topic_range(broker))) == COUNT


def test_a_line_that_is_cut_leaves_the_rest_to_a_client(
    broker: DiskBroker, bus: BlockingBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(bus)
    taken = 0

    def take(line: PageConnection) -> tuple[wire.Answer, memoryview]:
        nonlocal taken
        taken += 1
        if taken == 3:  # the hello, and a page
            line._socket.shutdown(socket.SHUT_RDWR)
        return original(line)

    original = PageConnection.take
    monkeypatch.setattr(PageConnection, "take", take)
    found = messages(topic_range(broker))
    assert [message.offset for message in found] == list(range(1, COUNT + 1))
    assert taken == 3


def test_a_line_whose_broker_was_started_again_is_replaced(tmp_path: Path) -> None:
    with DiskBroker(tmp_path) as broker:
        with broker.connect() as bus:
            fill(bus)
        before = page_connection(BrokerLogin(broker.url))
        assert before.is_idle()
    with DiskBroker(tmp_path, address=broker.address) as again:
        assert not before.is_idle()
        assert len(messages(topic_range(again))) == COUNT


def test_what_a_line_cannot_do_is_told_from_what_is_wrong(broker: DiskBroker) -> None:
    with pytest.raises(PageConnectionError, match="TLS"):
        PageConnection(BrokerLogin(broker.url.replace("runnel:", "runnels:")))
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(PageConnectionError):
        PageConnection(BrokerLogin(f"runnel://127.0.0.1:{port}"))
    assert not page_connections._connections.pop_all()
    line = page_connection(BrokerLogin(broker.url))
    line.ask(wire.Fetch(line.next_number(), "missing", 0, 1))
    with pytest.raises(PageConnectionError, match="unknown_topic"):
        line.take()
    assert not line.is_idle()
    nowhere = TopicRange(
        address=BrokerLogin(f"runnel://127.0.0.1:{port}"), topic="a", partition=0, begin=1, end=2
    )
    with pytest.raises(Unavailable, match="cannot connect"):
        messages(nowhere)
