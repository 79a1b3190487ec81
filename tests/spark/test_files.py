"""`option("path", …)`: the same rows without a broker, from its files or a copy of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from runnel.config import Rotate, TopicRule
from runnel.formats.message import Message
from tests.spark.brokers import DiskBroker
from tests.spark.read_results import assert_same, publish, sensor_messages, stored

RULES = (TopicRule(match="sensors/*", partitions=2, rotate=Rotate(bytes_max=16_384)),)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Message]]:
    """A data directory of several segments, not open in any process, and its messages."""
    directory: Path = tmp_path_factory.mktemp("shelf") / "data"
    with DiskBroker(directory, RULES) as serving, serving.connect() as bus:
        publish(bus, sensor_messages(800))
        messages = stored(bus, "sensors/a", "sensors/b")
    return directory, messages


def load(spark: SparkSession, path: Path, **options: str) -> DataFrame:
    chosen = {} if "topics" in options else {"pattern": "sensors/*"}
    return spark.read.format("runnel").options(**chosen, **options).load(str(path))


def test_files_have_the_same_rows(spark: SparkSession, shelf: tuple[Path, list[Message]]) -> None:
    directory, messages = shelf
    assert_same(load(spark, directory), messages)


def test_a_copy_is_as_good_and_split_into_tasks(
    spark: SparkSession, shelf: tuple[Path, list[Message]], tmp_path: Path
) -> None:
    directory, messages = shelf
    shutil.copytree(directory, tmp_path / "copy")
    frame = load(spark, tmp_path / "copy", bytesPerPartition="32k", topics="sensors/a")
    assert frame._jdf.queryExecution().toRdd().getNumPartitions() > 1
    assert_same(frame, [message for message in messages if message.topic == "sensors/a"])


def test_files_are_read_beside_a_broker_that_has_them_open(
    spark: SparkSession, broker: DiskBroker
) -> None:
    with broker.connect() as bus:
        publish(bus, sensor_messages(100))
        assert_same(load(spark, Path(broker.directory)), stored(bus, "sensors/a", "sensors/b"))


def test_options_and_filters_mean_the_same_as_with_a_broker(
    spark: SparkSession, shelf: tuple[Path, list[Message]]
) -> None:
    directory, messages = shelf
    times = sorted({message.receive_time_ns for message in messages})
    since_ns = times[len(times) // 2]
    frame = load(
        spark,
        directory,
        startingOffsets='{"sensors/a": {"1": 20}}',
        endingTime=f'{{"sensors/b": {since_ns}}}',
        tags='{"unit": "C"}',
    ).where("offset < 150 AND event_time > timestamp'2023-11-14 22:13:30' AND partition = 1")
    assert_same(
        frame,
        [
            message
            for message in messages
            if message.partition == 1
            and message.offset < 150
            and message.event_time_ns >= 1_700_000_010_000_001_000
            and message.tags.get("unit") == "C"
            and (message.offset >= 20 or message.topic == "sensors/b")
            and (message.topic == "sensors/a" or message.receive_time_ns < since_ns)
        ],
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topics": "sensors/z"}, "there is no topic 'sensors/z' in "),
        ({"startingOffsets": '{"sensors/a": {"0": 9999}}'}, "has not reached offset 9999"),
        ({"endingOffsets": '{"sensors/a": {"7": 1}}'}, "has partitions 0 to 1, not 7"),
    ],
)
def test_errors_say_what_would_be_right(
    spark: SparkSession, shelf: tuple[Path, list[Message]], options: dict[str, str], text: str
) -> None:
    with pytest.raises(PySparkException, match=text.replace("[", r"\[")):
        load(spark, shelf[0], **options).count()


def test_a_path_that_is_no_data_directory_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "export.parquet").write_bytes(b"PAR1")
    for path, text in (
        (tmp_path, "is not a data directory of Runnel"),
        (tmp_path / "nowhere", "no such directory"),
        (tmp_path / "export.parquet", "spark.read.parquet reads"),
    ):
        with pytest.raises(PySparkException, match=text):
            load(spark, path).count()


def test_damage_is_an_error_or_passed_over(
    spark: SparkSession, shelf: tuple[Path, list[Message]], tmp_path: Path
) -> None:
    directory, messages = shelf
    shutil.copytree(directory, tmp_path / "copy")
    largest = max(
        (path for path in (tmp_path / "copy" / "journals").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)
    with pytest.raises(PySparkException, match="damaged places"):
        load(spark, tmp_path / "copy").count()
    left = load(spark, tmp_path / "copy", failOnDataLoss="false").count()
    assert len(messages) - 100 <= left < len(messages)
