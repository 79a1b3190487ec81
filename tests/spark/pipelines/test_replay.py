"""Replays by real Spark: the same messages again, in order, once, under other names and at their pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from runnel.client import BlockingBus
from runnel.config import TopicRule
from runnel.errors import ClientFault, ProducerForgottenError, RunnelError, Unavailable
from runnel.formats.message import Message
from runnel.spark import replay
from runnel.spark.connections import BrokerLogin
from runnel.spark.pipelines.replay.job import ReplayResult
from runnel.spark.pipelines.replay.options import check_options
from runnel.spark.pipelines.replay.progress import ReplayProgress
from runnel.spark.pipelines.replay.sender import TASK, Sender
from runnel.spark.pipelines.replay.state import ReplayState, StateDirectory, TaskProgress
from runnel.spark.write.task_publisher import close_publishers
from tests.spark.brokers import DiskBroker
from tests.spark.pipelines.round_trip import check_round_trip
from tests.spark.read_results import START_NS, publish, sensor_messages, stored

RULES = (
    TopicRule(match="sensors/*", partitions=2),
    TopicRule(match="same/*", partitions=2),
    TopicRule(match="wide/*", partitions=3),
)
MILLION = 1_000_000

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskBroker]:
    """A broker with two topics that get no further messages."""
    with DiskBroker(tmp_path_factory.mktemp("home") / "data", RULES) as serving:
        with serving.connect() as bus:
            publish(bus, sensor_messages(800))
        yield serving


@pytest.fixture
def at_home(home: DiskBroker) -> Iterator[BlockingBus]:
    with home.connect() as connected:
        yield connected


def content(message: Message) -> tuple[Any, ...]:
    """All that a replay keeps."""
    return (
        message.key,
        message.payload,
        dict(message.tags),
        message.event_time_ns,
        message.transmit_time_ns,
        message.uid,
    )


def placed(message: Message) -> tuple[Any, ...]:
    return (message.partition, message.offset, *content(message))


# --- What comes out ---


def test_files_are_replayed_with_every_field_and_a_second_run_does_nothing(
    spark: SparkSession, home: DiskBroker, at_home: BlockingBus, tmp_path: Path
) -> None:
    def run() -> tuple[int, int]:
        done = replay(
            spark,
            path=home.directory,
            url=home.url,
            pattern="sensors/*",
            rename={"sensors/*": "same/*"},
            checkpoint=str(tmp_path),
        )
        return done.sent, done.already_there

    assert run() == (800, 0)
    for name in "ab":
        again = stored(at_home, f"same/{name}")
        assert list(map(placed, again)) == list(map(placed, stored(at_home, f"sensors/{name}")))
    assert run() == (0, 800)
    assert len(stored(at_home, "same/a", "same/b")) == 800


def test_a_broker_is_replayed_by_filters_into_another_number_of_partitions(
    spark: SparkSession, home: DiskBroker, at_home: BlockingBus
) -> None:
    source = stored(at_home, "sensors/a")
    times = sorted({message.receive_time_ns for message in source})
    since_ns = times[len(times) // 4]
    done = replay(
        spark,
        url=home.url,
        topics="sensors/a",
        rename=["sensors/*=wide/*"],
        since=since_ns,
        offsets={("sensors/a", 1): range(40, 120)},
        tags={"unit": "C"},
        where="event_time_ns % 2 = 0",
    )
    expected = [
        message
        for message in source
        if message.receive_time_ns >= since_ns
        and (message.partition != 1 or 40 <= message.offset < 120)
        and message.tags.get("unit") == "C"
        and message.event_time_ns % 2 == 0
    ]
    assert done.sent == len(expected) > 10
    found = stored(at_home, "wide/a")
    assert sorted(map(content, found), key=repr) == sorted(map(content, expected), key=repr)
    # Rows with the same key keep their order, and so do those without one that lay in one partition.
    for partition in (0, 1):
        for key in {message.key for message in expected if message.partition == partition}:
            order = [content(m) for m in expected if (m.partition, m.key) == (partition, key)]
            assert [each for each in map(content, found) if each in order] == order


@pytest.mark.slow
def test_a_million_messages_come_back_from_an_archive_as_they_were(
    spark: SparkSession, tmp_path: Path
) -> None:
    check_round_trip(spark, tmp_path, MILLION, seed=4711)


# --- Ended and gone on with ---


class Interrupted(Exception):
    pass


def test_a_paced_replay_that_was_interrupted_goes_on_and_lands_once(
    spark: SparkSession, home: DiskBroker, at_home: BlockingBus, tmp_path: Path
) -> None:
    def run(on_progress: Callable[[ReplayProgress], object], rate: float = 100) -> ReplayResult:
        return replay(
            spark,
            url=home.url,
            pattern="sensors/*",
            where="offset <= 75",
            rename={"sensors/*": "paced/*"},
            rate=rate,
            checkpoint=str(tmp_path),
            on_progress=on_progress,
        )

    def interrupt(progress: ReplayProgress) -> None:
        assert progress.messages_total == 300
        if progress.messages >= 50:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(interrupt)
    with pytest.raises(ClientFault, match=r"another replay: rate was 100\.0, and is 7\.0"):
        run(print, rate=7)
    # The workers that were left are about to be killed. Until then they go on, with the same numbers.
    seen: list[ReplayProgress] = []
    done = run(seen.append)
    assert done.messages == 300
    assert done.already_there >= 50
    assert seen[0].seconds_left is not None
    assert seen[0].seconds_left < 2.8
    for name in "ab":
        again = stored(at_home, f"paced/{name}")
        before = [m for m in stored(at_home, f"sensors/{name}") if m.offset <= 75]
        assert sorted(map(content, again), key=repr) == sorted(map(content, before), key=repr)


def test_by_event_time_all_partitions_share_one_clock_and_long_gaps_are_shortened(
    spark: SparkSession, home: DiskBroker, at_home: BlockingBus
) -> None:
    second_ns = 1_000_000_007  # from one message to the next
    done = replay(
        spark,
        path=home.directory,
        url=home.url,
        topics=["sensors/a", "sensors/b"],
        rename={"sensors/*": "same/clocked/*"},
        where=f"event_time_ns < {START_NS + 50 * second_ns} OR event_time_ns >= {START_NS + 750 * second_ns}",
        speed=100,
        gap_max_s=0.5,
    )
    assert done.sent == 100
    by_name = {name: stored(at_home, f"same/clocked/{name}") for name in "ab"}
    found = [*by_name["a"], *by_name["b"]]
    received = {message.event_time_ns: message.receive_time_ns for message in found}
    # Half a second of messages, seven of nothing that become half a one, and half a second of messages. A sender that
    # was late at first makes up for it, so that the whole may take less; what is due later never comes earlier.
    assert received[max(received)] - received[min(received)] < 6e9
    gap_ns = START_NS + 400 * second_ns
    first_ns = [found_in[0].receive_time_ns for found_in in (by_name["a"], by_name["b"])]
    late_ns = abs(first_ns[0] - first_ns[1])  # of a sender that a busy machine began late
    before_ns = max(at for due, at in received.items() if due < gap_ns)
    assert before_ns < late_ns + min(at for due, at in received.items() if due > gap_ns)
    for name in "ab":
        before = [
            content(message)
            for message in stored(at_home, f"sensors/{name}")
            if message.event_time_ns in received
        ]
        assert list(map(content, by_name[name])) == before


# --- One task, without Spark ---


def task_rows(count: int) -> list[pa.RecordBatch]:
    return [
        pa.record_batch(
            {
                TASK: pa.array([3] * 5_000, pa.int32()),
                "topic": ["t"] * 5_000,
                "partition": pa.array([0] * 5_000, pa.int32()),
                "payload": [b"%d" % row for row in range(begin, begin + 5_000)],
            }
        )
        for begin in range(0, count, 5_000)
    ]


def failing(rows: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from rows
    raise RuntimeError("no more")


@pytest.fixture
def directory(tmp_path: Path) -> StateDirectory:
    made = StateDirectory.at(str(tmp_path / "state"))
    made.save(ReplayState(version=1, replay_id="r", options=check_options(), parts=()))
    return made


def sender(broker: DiskBroker, directory: StateDirectory) -> Sender:
    return Sender(
        address=BrokerLogin(broker.url), deadline_s=20, replay_id="r", directory=directory
    )


def send(sender: Sender, rows: Iterator[pa.RecordBatch]) -> list[int]:
    try:
        (told,) = sender.send(rows)
    finally:
        close_publishers()  # which a worker would keep
    return [column[0].as_py() for column in told.columns]


@pytest.mark.parametrize("has_progress", [True, False])
def test_a_task_that_failed_half_way_lands_once_when_it_runs_again(
    broker: DiskBroker, bus: BlockingBus, directory: StateDirectory, has_progress: bool
) -> None:
    rows = task_rows(60_000)
    with pytest.raises(RuntimeError, match="no more"):
        send(sender(broker, directory), failing(rows[:8]))
    if has_progress:
        directory.report(3, TaskProgress(batches=2, rows=20_000))
    told = send(sender(broker, directory), iter(rows))
    assert told[:2] == [3, 60_000]
    assert told[2] in (20_000, 30_000, 40_000)
    assert [int(message.payload) for message in stored(bus, "t")] == list(range(60_000))
    assert directory.progress(3).rows == 60_000
    assert send(sender(broker, directory), iter(rows)) == [3, 60_000, 60_000]
    assert bus.topic("t").messages == 60_000


def test_a_broker_that_does_not_know_the_producer_gets_nothing_a_second_time(
    broker: DiskBroker, bus: BlockingBus, directory: StateDirectory
) -> None:
    directory.report(3, TaskProgress(batches=2, rows=20_000))
    with pytest.raises(ProducerForgottenError):
        send(sender(broker, directory), iter(task_rows(60_000)))
    assert bus.topic("t").messages == 0


# --- Trouble ---


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"topics": "sensors/x"}, "topic 'sensors/x' does not exist; did you mean sensors/"),
        ({"pattern": "none/*"}, "nothing to replay: the broker .* topics that match 'none/"),
        (
            {"topics": "sensors/a", "where": "size > 1000000"},
            "has no messages of sensors/a that where would leave",
        ),
        ({"topics": "sensors/a"}, "sensors/a would go into the topic of the same name"),
        ({"where": "celsius > 3"}, "where is 'celsius > 3': .* cannot be resolved"),
        ({"where": "size >"}, "where is 'size >': .*[Ss]yntax error"),
        ({"path": "/nowhere"}, "no such directory"),
        ({"archive": "/nowhere"}, "/nowhere"),
        ({"tasks": 0}, "tasks is 0"),
        (
            {"offsets": {("sensors/a", 0): range(5, 9999)}},
            r"sensors/a\[0\] has not reached offset 9999",
        ),
    ],
)
def test_what_cannot_be_replayed_is_reported(
    spark: SparkSession, home: DiskBroker, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RunnelError, match=problem):
        replay(spark, url=home.url, **options)


def test_a_broker_that_is_not_there_is_told_of_at_once(
    spark: SparkSession, home: DiskBroker
) -> None:
    with pytest.raises(Unavailable, match=r"cannot connect to 127\.0\.0\.1:1"):
        replay(spark, path=home.directory, url="runnel://127.0.0.1:1")
