"""Publishing a task's batches: in order, several under way, and again what was not acknowledged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from runnel.client import BlockingBus, connect_blocking
from runnel.errors import ProducerFault, ProducerFencedError, Unavailable
from runnel.formats.batch import Batch
from runnel.spark.connections import BrokerLogin
from runnel.spark.write.chunks import Chunker
from runnel.spark.write.task_publisher import Tally, TaskPublisher
from tests.spark.brokers import DiskBroker

PAYLOAD = b"x" * 900
CHUNK_BYTES = 4 * 1000
ROWS = 400


def batches(
    publisher: TaskPublisher, *, term: int = 1, rows: int = ROWS, bytes_max: int = CHUNK_BYTES
) -> Iterator[Batch]:
    """A hundred of four rows each."""
    chunker = Chunker(
        "p",
        term,
        topic="t",
        turn=0,
        bytes_max=bytes_max,
        find_routes=publisher.find_routes,
        now_ns=lambda: 1,
    )
    numbered = [b"%d " % row + PAYLOAD for row in range(rows)]
    return chunker.batches([pa.record_batch({"payload": pa.array(numbered, pa.binary())})])


def numbers(bus: BlockingBus) -> list[int]:
    page = bus.fetch("t", 1, bytes_max=2**24)
    assert page.next_offset == page.end_offset
    return [int(message.payload.split()[0]) for message in page.messages]


@pytest.fixture
def publisher(broker: DiskBroker) -> Iterator[TaskPublisher]:
    made = TaskPublisher(BrokerLogin(broker.url), 20)
    yield made
    made.close()


def test_batches_are_stored_in_order(publisher: TaskPublisher, bus: BlockingBus) -> None:
    assert publisher.publish(batches(publisher)) == Tally(rows=ROWS, batches=100)
    assert numbers(bus) == list(range(ROWS))


def test_what_comes_again_is_counted_and_not_stored(
    publisher: TaskPublisher, bus: BlockingBus
) -> None:
    publisher.publish(batches(publisher, rows=ROWS // 2))
    assert publisher.publish(batches(publisher)) == Tally(ROWS, 100, rows_repeated=ROWS // 2)
    assert numbers(bus) == list(range(ROWS))


def test_a_term_that_was_followed_by_another_may_not_publish(publisher: TaskPublisher) -> None:
    publisher.publish(batches(publisher, term=2))
    with pytest.raises(ProducerFencedError):
        publisher.publish(batches(publisher, term=1))


def test_other_rows_under_the_same_numbers_are_refused(
    publisher: TaskPublisher, bus: BlockingBus
) -> None:
    publisher.publish(batches(publisher))
    with pytest.raises(ProducerFault, match="sort them within their partitions"):
        publisher.publish(batches(publisher, bytes_max=2 * CHUNK_BYTES))
    assert len(numbers(bus)) == ROWS


class Restarting:
    """A broker that is stopped and started again whenever it is asked to."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running = DiskBroker(directory).__enter__()
        self.url = self._running.url

    def restart(self) -> None:
        self.stop()
        address = self._running.address
        self._running = DiskBroker(self._directory, address=address).__enter__()

    def stop(self) -> None:
        self._running.__exit__(None, None, None)


def test_a_broker_that_restarts_under_a_task_gets_each_row_once(tmp_path: Path) -> None:
    broker = Restarting(tmp_path / "data")
    publisher = TaskPublisher(BrokerLogin(broker.url), 20)

    def interrupted(whole: Iterable[Batch]) -> Iterator[Batch]:
        for place, batch in enumerate(whole):
            if place % 30 == 29:  # while those before it are under way
                broker.restart()
            yield batch

    try:
        assert publisher.publish(interrupted(batches(publisher))).rows == ROWS
        with connect_blocking(broker.url) as bus:
            assert numbers(bus) == list(range(ROWS))
    finally:
        publisher.close()
        broker.stop()


def test_an_absent_broker_is_given_up_after_the_deadline(tmp_path: Path) -> None:
    with DiskBroker(tmp_path / "data") as broker:
        publisher = TaskPublisher(BrokerLogin(broker.url), 0.3)
        made = list(batches(publisher))
    with pytest.raises(Unavailable, match="publishing to t"):
        publisher.publish(made)
    publisher.close()
