"""`archive` and `read_archive` with a real broker and Spark: every message once, whatever happens on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from runnel.cli.main import run
from runnel.client import BlockingBus
from runnel.config import TopicRule
from runnel.errors import ClientFault
from runnel.formats.message import Message
from runnel.spark import archive, archive_status, compact, read_archive
from runnel.spark.pipelines.archive.status import ArchiveStatus
from runnel.spark.pipelines.archive.table import ArchiveTable
from runnel.spark.pipelines.streaming_query import PipelineFailedError, PipelineProgress
from tests.spark.brokers import DiskBroker
from tests.spark.pipelines import archive_driver
from tests.spark.pipelines.archived_rows import ODD_TOPICS, START_NS, rows, write
from tests.spark.read_results import assert_same, publish, sensor_messages, stored

RULES = (TopicRule(match="wide/*", partitions=3),)
SECONDS_MAX = 240


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[DiskBroker]:
    with DiskBroker(tmp_path / "data", RULES) as serving:
        yield serving


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "table"


def publish_wide(bus: BlockingBus, count: int) -> None:
    """To several partitions."""
    publish(bus, [Message("wide/w", b"%d" % row, key=b"%d" % row) for row in range(count)])


ALL = ("sensors/a", "sensors/b", "wide/w")


@pytest.mark.timeout(300)
def test_topics_are_archived_once_and_read_back_with_and_without_the_log(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus, table: Path
) -> None:
    publish(bus, sensor_messages(200))
    told: list[PipelineProgress] = []
    done = archive(
        spark,
        table,
        pattern="*",
        url=broker.url,
        rows_per_trigger_max=100,
        on_progress=told.append,
    )
    assert (done.batches, done.rows, done.entries_behind) == (2, 200, 0)
    assert told[-1] == done

    publish(bus, sensor_messages(50))
    publish_wide(bus, 60)  # a topic that was not there the first time
    assert archive(spark, table, pattern="*", url=broker.url).rows == 110
    assert archive(spark, table, pattern="*", url=broker.url).rows == 0
    status = archive_status(table)
    assert (status.rows, status.topics, status.layout) == (310, 3, 1)
    (query,) = status.queries
    assert (query.messages_behind, query.problem) == (0, None)
    assert bus.cursor(query.cursor) is not None

    # While the archive stands still, the log goes on; compaction changes nothing of it.
    publish(bus, sensor_messages(30))
    publish_wide(bus, 30)
    bus.publish("late", b"only in the log")
    messages = stored(bus, *ALL, "late")
    assert compact(table).files_before > 0
    both = read_archive(spark, table, history="archive+log", url=broker.url)
    assert_same(both, messages)
    assert both.columns == read_archive(spark, table).columns
    of_one = read_archive(
        spark, table, topics=["wide/w", "late"], history="archive+log", url=broker.url
    )
    assert_same(of_one, [message for message in messages if message.topic in ("wide/w", "late")])

    # A frame is of the version that it was made of, also while the archive goes on.
    before = read_archive(spark, table)
    assert archive(spark, table, pattern="*", url=broker.url).rows == 61
    assert before.count() == 310
    assert_same(read_archive(spark, table), messages)


def test_an_archive_is_read_by_topic_and_time(spark: SparkSession, tmp_path: Path) -> None:
    opened = ArchiveTable.prepare(tmp_path / "we[i]rd {table}")
    hour_ns = 3600 * 10**9
    times = [START_NS + hour * hour_ns for hour in range(4)]  # the last two on the next day
    files = [
        file
        for topic in ODD_TOPICS
        for file in write(opened.path, rows([topic] * 4, receive_ns=times))
    ]
    opened.add(files, "q", 0)
    everything = read_archive(spark, opened.path).select("topic", "offset").collect()
    assert sorted(map(tuple, everything)) == sorted(
        (topic, offset) for topic in ODD_TOPICS for offset in range(1, 5)
    )
    some = read_archive(
        spark,
        opened.path,
        topics=["007", "with/slash"],
        since="2023-11-14T23:13:20Z",
        until=times[3],
    )
    assert sorted((row.topic, row.offset) for row in some.collect()) == [
        ("007", 2),
        ("007", 3),
        ("with/slash", 2),
        ("with/slash", 3),
    ]
    assert len(some.inputFiles()) == 4
    assert len(read_archive(spark, opened.path, pattern="with*").inputFiles()) == 4
    assert read_archive(spark, opened.path, pattern="nothing*").inputFiles() == []
    compact(opened.path)
    assert read_archive(spark, opened.path).where("topic = '100%'").count() == 4


def test_what_retention_took_before_it_was_read_is_an_error_or_told(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus, table: Path
) -> None:
    publish(bus, [Message("a", b"%d" % row) for row in range(3)])
    archive(spark, table, topics="a", url=broker.url)
    publish(bus, [Message("a", b"%d" % row) for row in range(3, 6)])
    bus.purge_topic("a")
    publish(bus, [Message("a", b"%d" % row) for row in range(6, 8)])
    with pytest.raises(Exception, match=r"offset 4 of a\[0\] is gone"):
        read_archive(spark, table, history="archive+log", url=broker.url).count()
    going_on = read_archive(
        spark, table, history="archive+log", url=broker.url, fails_on_data_loss=False
    )
    assert sorted(int(bytes(row.payload)) for row in going_on.collect()) == [0, 1, 2, 6, 7]
    with pytest.raises(PipelineFailedError, match=r"a\[0\] offsets 4 to 6"):
        archive(spark, table, topics="a", url=broker.url)
    done = archive(spark, table, topics="a", url=broker.url, fails_on_data_loss=False)
    assert done.rows == 2


def test_a_lost_checkpoint_does_not_double_messages(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus, table: Path, tmp_path: Path
) -> None:
    publish(bus, sensor_messages(10))
    archive(spark, table, pattern="*", url=broker.url)
    with pytest.raises(PipelineFailedError, match=r"up to offset 5, and would get offset 1 again"):
        archive(spark, table, pattern="*", url=broker.url, checkpoint=tmp_path / "another")
    assert_same(read_archive(spark, table), stored(bus, "sensors/a", "sensors/b"))


def test_a_continuous_archive_is_compacted_beside_and_ends_when_interrupted(
    spark: SparkSession, broker: DiskBroker, bus: BlockingBus, table: Path
) -> None:
    publish(bus, sensor_messages(20))

    def go_on(progress: PipelineProgress) -> None:
        if progress.rows >= 60 and has_compacted():
            raise KeyboardInterrupt
        publish(bus, sensor_messages(20))

    def has_compacted() -> bool:
        history = DeltaTable(table).history()
        return any(commit.get("runnel.operation") == "compaction" for commit in history)

    with pytest.raises(KeyboardInterrupt):
        archive(
            spark,
            table,
            pattern="*",
            url=broker.url,
            every_s=0.1,
            compact_every_s=0.5,
            on_progress=go_on,
        )
    assert not spark.streams.active
    archive(spark, table, pattern="*", url=broker.url)
    assert_same(read_archive(spark, table), stored(bus, "sensors/a", "sensors/b"))


def kill_driver(url: str, directory: Path) -> None:
    """One with two archives, killed while the first was about to commit and the second had just done it."""
    errors = directory / "stderr"
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, archive_driver.__file__, url, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # so that its JVM and workers can be killed with it
        )
    marks = [directory / "stuck_before-stuck", directory / "stuck_after-stuck"]
    try:
        ends_at_s = time.monotonic() + SECONDS_MAX
        while not all(mark.exists() for mark in marks):
            assert process.poll() is None, errors.read_text()[-3000:]
            assert time.monotonic() < ends_at_s, errors.read_text()[-3000:]
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def parquet_files(table: Path) -> int:
    return sum("_delta_log" not in path.parts for path in table.rglob("*.parquet"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_failed_tasks_a_killed_driver_and_a_restarted_broker_leave_each_message_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    before, after = tmp_path / "stuck_before", tmp_path / "stuck_after"
    with DiskBroker(tmp_path / "data") as broker, broker.connect() as bus:
        publish(bus, sensor_messages(100))
        kill_driver(broker.url, tmp_path)
        assert len(DeltaTable(before).file_uris()) == 0
        assert len(DeltaTable(after).file_uris()) == 2
        # Of an attempt that failed, and of its retry.
        assert parquet_files(before) == parquet_files(after) == 4
        publish(bus, sensor_messages(10))
        messages = stored(bus, "sensors/a", "sensors/b")
        address = broker.address
    with DiskBroker(tmp_path / "data", address=address) as again:
        for table in (before, after):
            archive(spark, table, pattern="*", url=again.url)
            assert_same(read_archive(spark, table), messages)
            (query,) = archive_status(table).queries
            assert (query.last_batch, query.messages_behind) == (1, 0)


# --- The command ---


def test_the_command_archives_compacts_and_tells(
    spark: SparkSession,
    broker: DiskBroker,
    bus: BlockingBus,
    table: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(bus, sensor_messages(10))
    base = ["pipeline", "archive", "--to", str(table)]
    taking = [*base, "--topics", "sensors/a, sensors/b", "--url", broker.url, "--once"]
    assert run(taking) == 0
    assert "archived 10 messages in 1 batch" in capsys.readouterr().err
    publish(bus, sensor_messages(10))
    assert run([*taking, "--compact"]) == 0
    told = capsys.readouterr().err
    assert "archived 10 messages in 1 batch" in told
    assert "joined 4 files into 2" in told
    assert run([*base, "--status", "--url", broker.url]) == 0
    told = capsys.readouterr().out
    assert "20 messages of 2 topics, 2 files" in told
    assert "sensors/a, sensors/b" in told
    assert run([*base, "--status", "--json", "--url", broker.url]) == 0
    status = msgspec.json.decode(capsys.readouterr().out, type=ArchiveStatus)
    assert status.queries[0].messages_behind == 0
    assert run([*base, "--compact"]) == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "which topics? --topics"),
        (
            ["--pattern", "*", "--every", "10"],
            "--every '10': a duration needs a unit; write \"10s\"",
        ),
        (["--pattern", "*", "--compact"], "--compact is for --once"),
        (["--status"], "there is no archive in"),
        (["--status", "--once"], "--status shows"),
        (["--json"], "--json is the form of --status"),
        (["--compact", "--vacuum-older", "0s"], "at least 1 hour"),
    ],
)
def test_a_wrong_command_is_refused(
    table: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    assert run(["pipeline", "archive", "--to", str(table), *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_wrong_arguments_are_refused(spark: SparkSession, table: Path) -> None:
    with pytest.raises(ClientFault, match="every_s is 0"):
        archive(spark, table, pattern="*", every_s=0)
    with pytest.raises(ClientFault, match="there is no archive in"):
        read_archive(spark, table / "x")
    ArchiveTable.prepare(table)
    with pytest.raises(ClientFault, match="history is 'log'"):
        read_archive(spark, table, history="log")  # type: ignore[arg-type]
    with pytest.raises(ClientFault, match="since is 'monday'"):
        read_archive(spark, table, since="monday")
    with pytest.raises(ClientFault, match="has no topic 'x'; it has 0"):
        read_archive(spark, table, topics="x")
    with pytest.raises(ClientFault, match="not both"):
        read_archive(spark, table, topics="x", pattern="y")
    with pytest.raises(PipelineFailedError, match="cannot connect"):
        archive(spark, table, pattern="*", url="runnel://127.0.0.1:1")
