"""A real cluster, whose executors have a Python without Runnel and a machine without Java; and what fails on it.

A local session runs a failed task only once; here they are retried, executors die, and the driver is killed.
"""

from __future__ import annotations

import json
import shlex
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from runnel.client import BlockingBus
from runnel.testing import BrokerThread
from tests.spark import driver
from tests.spark.brokers import DiskBroker
from tests.spark.cluster import Cluster, environment_without_java
from tests.spark.driver_process import Driver, DriverFailedError
from tests.spark.read_results import publish, sensor_messages, stored
from tests.spark.row_batches import check_each_once, repeated, run_stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Without `site` an editable installation is not seen; what is compiled has to be there.
PYTHON = """\
#!/bin/sh
PYTHONPATH="$PYTHONPATH:{packages}" exec {python} -S -W ignore "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def remote(cluster: Cluster) -> Iterator[Driver]:
    """A driver of the cluster."""
    python = cluster.directory / "python"
    python.write_text(
        PYTHON.format(packages=sysconfig.get_path("purelib"), python=shlex.quote(sys.executable))
    )
    python.chmod(0o755)
    environment = environment_without_java(cluster.directory) | {"PYSPARK_PYTHON": str(python)}
    with Driver(cluster.url, cluster.directory, environment) as running:
        yield running


def test_executors_without_runnel_are_sent_it_and_none_needs_a_java(remote: Driver) -> None:
    where = remote.do("where")
    assert {version.partition(".")[0] for version in where["java"]} == {"25"}
    directories, files = zip(*where["runnel"], strict=True)
    assert len(set(directories)) == 2
    assert all(".zip/" in file for file in files)


def test_topics_are_read_by_executors(remote: Driver, broker: DiskBroker, bus: BlockingBus) -> None:
    publish(bus, sensor_messages(500))
    expected = stored(bus, "sensors/a", "sensors/b")
    found = remote.do("read", url=broker.url, pattern="sensors/*", bytesPerPartition="4k")
    assert [tuple(row) for row in found] == sorted(
        (message.topic, message.offset, message.payload.decode()) for message in expected
    )


def test_a_stream_from_topics_to_a_topic_brings_each_message_once(
    remote: Driver, broker: DiskBroker, bus: BlockingBus, tmp_path: Path
) -> None:
    publish(bus, sensor_messages(500))
    options = {"url": broker.url, "pattern": "sensors/*", "startingOffsets": "earliest"}
    batches = remote.do(
        "copy", into="copies", checkpoint=str(tmp_path), maxRowsPerTrigger="200", **options
    )
    assert sum(batches) == 500
    assert max(batches) <= 200
    originals = stored(bus, "sensors/a", "sensors/b")
    assert sorted((m.payload, m.event_time_ns) for m in stored(bus, "copies")) == sorted(
        (m.payload, m.event_time_ns) for m in originals
    )
    assert [cursor.name.partition("/")[0] for cursor in bus.cursors()] == ["spark"]


def test_an_archive_is_filled_by_executors(
    remote: Driver, broker: DiskBroker, bus: BlockingBus, tmp_path: Path
) -> None:
    publish(bus, sensor_messages(500))
    table = str(tmp_path / "table")
    found = remote.do("archive", table=table, url=broker.url, pattern="sensors/*")
    assert [tuple(row) for row in found] == sorted(
        (message.topic, message.offset, message.payload.decode())
        for message in stored(bus, "sensors/a", "sensors/b")
    )


def test_statistics_are_made_by_executors(
    remote: Driver, runnel_broker: BrokerThread, tmp_path: Path
) -> None:
    with runnel_broker.connect_blocking() as bus:
        for count in (30, 1):
            with bus.publisher("sensors/a") as publisher:
                for _ in range(count):
                    publisher.send(b"21.5")
            runnel_broker.advance(120)  # the minute of the first is over
        table = str(tmp_path / "table")
        url = runnel_broker.url
        told = remote.do("stats", url=url, topics="sensors/a", table=table, publish="figures")
        assert told == 31
        (row,) = DeltaTable(table).to_pyarrow_table().to_pylist()
        assert (row["topic"], row["messages"], row["bytes"]) == ("sensors/a", 30, 120)
        (figure,) = stored(bus, "figures/main/sensors/a")
        assert json.loads(figure.payload)["messages"] == 30


@pytest.mark.parametrize(
    ("how", "stage_attempts", "chunks"), [("task", 1, 4), ("shuffle", 2, 4), ("executor", 1, 2)]
)
def test_rows_land_once_when_what_wrote_them_fails(
    remote: Driver, broker: DiskBroker, bus: BlockingBus, how: str, stage_attempts: int, chunks: int
) -> None:
    assert remote.do("write_failing", url=broker.url, topic="rows", how=how) >= stage_attempts
    check_each_once(bus, "rows", driver.ROWS)
    assert repeated(bus) >= chunks


def test_batches_of_a_query_that_are_repeated_or_whose_driver_is_killed_land_once(
    remote: Driver,
    spark: SparkSession,
    tmp_path: Path,
    rows_directory: Path,
    broker: DiskBroker,
    bus: BlockingBus,
) -> None:
    twice = {"url": broker.url, "rows": str(rows_directory), "checkpoint": str(tmp_path / "twice")}
    with pytest.raises(DriverFailedError, match="after writing"):
        remote.do("write_twice", fails=True, **twice)
    remote.do("write_twice", fails=False, **twice)
    check_each_once(bus, "all")
    check_each_once(bus, "few", 10)
    before = repeated(bus)
    assert before == 4  # three chunks of one write, one of the other
    remote.begin(
        "write_stuck",
        url=broker.url,
        topic="stream",
        rows=str(rows_directory),
        checkpoint=str(tmp_path / "checkpoint"),
        marker=str(tmp_path / "committing"),
    )
    remote.wait_for_file(tmp_path / "committing")
    remote.kill()
    check_each_once(bus, "stream")
    run_stream(spark, tmp_path, broker)
    check_each_once(bus, "stream")
    assert repeated(bus) - before == 3
