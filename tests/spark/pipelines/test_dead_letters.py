"""Rows that cannot become messages go to the dead-letter topic, with the reason, once, and hold up nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from runnel.client import BlockingBus
from runnel.config import TopicRule
from runnel.errors import InvalidNameError
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.formats.wire import Owner, Route
from runnel.spark.write.chunks import Chunker
from runnel.spark.write.dead_letters import RowDeadLetters
from runnel.spark.write.row_faults import TAG_BYTES_MAX, Limits
from tests.spark.brokers import DiskBroker
from tests.spark.read_results import stored

NOW_NS = 1_700_000_000_123_456_789
UID = bytes(range(20))
DEAD = "!dead/p"
LIMITS = Limits(message_bytes_max=2000, batch_bytes_max=300_000)
SCHEMA = pa.schema(
    [
        ("payload", pa.binary()),
        ("topic", pa.string()),
        ("key", pa.binary()),
        ("tags", pa.map_(pa.string(), pa.string())),
        ("event_time", pa.timestamp("us", "UTC")),
        ("uid", pa.binary()),
        ("partition", pa.int32()),
    ]
)


def routes(topics: Sequence[str]) -> Mapping[str, Route]:
    """Topics that begin with 4 have so many partitions; dead letters a journal of their own."""
    return {
        topic: Route(
            topic,
            "disk",
            [Owner("!dead" if topic == DEAD else "main", 0, 1)] * (4 if topic[0] == "4" else 1),
        )
        for topic in topics
    }


def rows(*given: Mapping[str, object]) -> pa.RecordBatch:
    plain = {"payload": b"x", "topic": "t"}
    return pa.RecordBatch.from_pylist([{**plain, **row} for row in given], SCHEMA)


def batches_of(
    *arrived: pa.RecordBatch, topic: str | None = None, has_dead_letters: bool = True
) -> list[Batch]:
    chunker = Chunker(
        "p",
        7,
        topic=topic,
        turn=0,
        bytes_max=20_000,
        find_routes=routes,
        now_ns=lambda: NOW_NS,
        dead_letters=RowDeadLetters(DEAD, "test", LIMITS) if has_dead_letters else None,
    )
    return [Batch.unpack(batch.pack()) for batch in chunker.batches(arrived)]


def messages_of(*arrived: pa.RecordBatch, topic: str | None = None) -> list[Message]:
    return [message for batch in batches_of(*arrived, topic=topic) for message in batch]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"payload": None}, "payload is null"),
        ({"payload": b"x" * 2001}, "a message of 2001 bytes is larger than limits.message_bytes"),
        ({"topic": None}, "topic is null"),
        ({"topic": ""}, "the topic name is empty"),
        ({"topic": "a\nb"}, "has the control character U+000A at character 2"),
        ({"topic": "ü" * 200}, "is longer than 255 bytes"),
        ({"uid": b"short"}, "a uid of 5 bytes: it must have 20"),
        ({"tags": [("a", None)]}, "a tag has the value null"),
        ({"tags": [(str(n), "") for n in range(65)]}, "65 tags: at most 64"),
        ({"tags": [("a", "b" * TAG_BYTES_MAX)]}, "65537 bytes of tags: at most 65536"),
        ({"event_time": 2**62}, "outside the years 1678 to 2261"),
        ({"key": b"k" * 300_000}, "bytes with its key and tags is larger than limits.batch_bytes"),
        ({"topic": "4", "partition": 4}, "4 has partitions 0 to 3, not 4"),
        ({"partition": -1}, "t has partitions 0 to 0, not -1"),
    ],
)
def test_a_row_that_cannot_be_published_is_a_dead_letter_and_the_others_go_on(
    row: dict[str, object], error: str
) -> None:
    found = messages_of(rows({"payload": b"1"}, row, {"payload": b"2"}))
    assert [message.payload for message in found if message.topic == "t"] == [b"1", b"2"]
    (letter,) = [message for message in found if message.topic == DEAD]
    assert error in letter.tags["dead.error"]
    assert letter.tags["dead.from"] == "test, row 1"


def test_a_dead_letter_keeps_what_fits() -> None:
    bad = {"payload": b"21.5", "topic": "no\tname", "key": b"k", "tags": [("unit", "C")]}
    (letter,) = messages_of(rows(bad | {"event_time": 5, "uid": UID}))
    assert (letter.payload, letter.key, letter.uid) == (b"21.5", b"k", UID)
    assert letter.event_time_ns == 5000
    assert letter.tags["unit"] == "C"
    assert letter.tags["dead.topic"] == "no\tname"

    too_large = {"payload": b"x" * 2001, "key": b"k" * 40_000, "tags": [("a", "b" * 40_000)]}
    (letter,) = messages_of(rows(too_large | {"event_time": 2**62, "uid": b"?"}))
    assert (letter.payload, letter.key, letter.uid) == (b"", None, None)
    assert letter.event_time_ns == NOW_NS
    assert set(letter.tags) == {"dead.error", "dead.topic", "dead.from"}


def test_a_row_without_a_topic_takes_the_option_and_lives() -> None:
    (message,) = messages_of(rows({"topic": None}), topic="other")
    assert message.topic == "other"
    (letter,) = messages_of(rows({"topic": None, "payload": None}), topic="other")
    assert letter.tags["dead.topic"] == "other"


def test_letters_about_many_small_rows_fill_several_batches() -> None:
    cut = batches_of(rows(*[{"topic": "\n" * 100, "payload": b"%d" % n} for n in range(200)]))
    assert len(cut) > 2
    assert [message.payload for batch in cut for message in batch] == [
        b"%d" % n for n in range(200)
    ]
    assert max(batch.envelope.body_bytes for batch in cut) <= 20_000
    assert [batch.envelope.number for batch in cut] == list(range(len(cut)))


def test_dead_letters_are_the_same_however_spark_groups_the_rows() -> None:
    whole = rows(
        *[
            {"payload": b"%d" % n, "topic": ("t", "4", "\n", None)[n % 4], "partition": n % 5}
            for n in range(400)
        ]
    )
    at_once = [batch.pack() for batch in batches_of(whole)]
    for ends in ((0, 1, 399, 400), (0, 50, 333, 400)):
        parts = [whole.slice(begin, end - begin) for begin, end in pairwise(ends)]
        assert [batch.pack() for batch in batches_of(*parts)] == at_once


def test_without_a_dead_letter_topic_the_task_fails() -> None:
    with pytest.raises(InvalidNameError, match="control character"):
        batches_of(rows({}, {"topic": "a\nb"}), has_dead_letters=False)


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_the_dead_letter_topic_needs_a_name_that_can_be(spark: SparkSession, name: str) -> None:
    with pytest.raises(Exception, match="option deadLetterTopic"):
        spark.sql("SELECT 'x' AS payload").write.format("runnel").mode("append").options(
            topic="t", deadLetterTopic=name
        ).save()


def test_a_write_with_bad_rows_lands_once_good_and_bad(spark: SparkSession, tmp_path: Path) -> None:
    rules = (TopicRule(match="four", partitions=4, journal="four"),)
    given = spark.range(0, 30, 1, 2).selectExpr(
        "CASE WHEN id % 10 = 3 THEN repeat('x', 1500000) ELSE cast(id AS string) END AS payload",
        "CASE id % 10 WHEN 4 THEN '' WHEN 5 THEN 'four' ELSE 'good' END AS topic",
        "CASE WHEN id % 10 = 5 THEN 9 END AS partition",
        "cast(id AS string) AS key",
    )
    with DiskBroker(tmp_path / "data", rules) as broker, broker.connect() as bus:
        for _ in range(2):  # the second time, everything is there
            given.write.format("runnel").mode("append").options(
                url=broker.url, producer="p", deadLetterTopic=DEAD
            ).save()
        good, dead = stored(bus, "good"), stored(bus, DEAD)
        check_good_and_dead(bus, good, dead)


def check_good_and_dead(bus: BlockingBus, good: list[Message], dead: list[Message]) -> None:
    assert sorted(int(m.payload) for m in good) == [
        number for number in range(30) if number % 10 not in (3, 4, 5)
    ]
    by_key = {int(m.key or b""): m for m in dead}
    assert sorted(by_key) == [number for number in range(30) if number % 10 in (3, 4, 5)]
    assert len(dead) == len(by_key)
    assert "1500000 bytes" in by_key[3].tags["dead.error"]
    assert by_key[3].payload == b""
    assert "the topic name is empty" in by_key[14].tags["dead.error"]
    assert by_key[14].payload == b"14"
    assert "four has partitions 0 to 3, not 9" in by_key[25].tags["dead.error"]
    assert (by_key[25].payload, by_key[25].tags["dead.topic"]) == (b"25", "four")
    assert by_key[25].tags["dead.from"].startswith("producer p/1, term 1, row ")
    assert bus.statistics()["totals"]["publishes_repeated"] > 0
