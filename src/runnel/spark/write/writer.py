"""Writes rows to topics exactly once: `df.write` and `df.writeStream` with format `runnel`.

A task identifies itself to the broker: its producer is the query (or the batch write) and the Spark partition, its term
is the micro-batch, and its batches are numbered. A task, a stage or, after a crash, a micro-batch that runs again sends
the same numbers, and for batches that the broker already has it answers with their offsets. So there is nothing to
commit, and nothing that an abort could undo. This requires a plan whose partitions have the same rows in the same order
each time, and topics that are kept: the broker remembers nothing of ephemeral topics. With the option `sort` a task
sorts its rows itself, for which it has to hold all of them in memory.
"""

from __future__ import annotations

import difflib
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from runnel.client.connection import parse_url
from runnel.errors import ClientFault
from runnel.formats.wire import Welcome
from runnel.spark.connections import BrokerLogin, default_url
from runnel.spark.write.chunks import Chunker
from runnel.spark.write.dead_letters import RowDeadLetters
from runnel.spark.write.row_columns import check_schema, in_repeatable_order
from runnel.spark.write.row_faults import Limits
from runnel.spark.write.task_publisher import publisher_to
from runnel.topics.names import NAME_BYTES_MAX, check_text, check_topic

if TYPE_CHECKING:
    import pyarrow

_OPTIONS: Final = (
    "url",
    "token",
    "topic",
    "deadLetterTopic",
    "producer",
    "sort",
    "deadlineSeconds",
    "level",
)
_OPTIONS_OF_SPARK: Final = ("checkpointlocation", "queryname")  # which Spark passes on
_DEFAULT_DEADLINE_S: Final = 120.0
_DEFAULT_NAME: Final = "spark"
_NAME_BYTES_MAX: Final = NAME_BYTES_MAX - 55  # the rest holds the query's id and the partition

# Local properties that Spark sets for the jobs of a streaming query, also within foreachBatch.
_QUERY_ID: Final = "sql.streaming.queryId"
_BATCH_ID: Final = "streaming.sql.batchId"


class RowsWritten(WriterCommitMessage):
    """The commit message of a task."""

    def __init__(self, rows: int, rows_repeated: int) -> None:
        self.rows = rows
        self.rows_repeated = rows_repeated


class WriteOptions(msgspec.Struct, frozen=True):
    """The options of a write. The driver parses them, so its environment counts, not that of the workers."""

    address: BrokerLogin
    topic: str | None
    producer: str | None
    deadline_s: float
    dead_letter_topic: str | None = None
    sorts: bool = False  # for rows whose order differs each time the plan runs

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        given = {name.lower(): value for name, value in options.items()}
        names = {name.lower(): name for name in _OPTIONS}
        for name in given:
            if name not in names and name not in _OPTIONS_OF_SPARK:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {names[near[0]]}? " if near else ""
                raise ClientFault(
                    f"option {name!r} is not one of writing: {hint}There are {', '.join(_OPTIONS)}"
                )
        url = given.get("url") or default_url()
        parse_url(url)
        if (topic := given.get("topic")) is not None:
            check_topic(topic)
        if (dead_letter_topic := given.get("deadlettertopic")) is not None:
            check_text("option deadLetterTopic", dead_letter_topic)
        if (producer := given.get("producer")) is not None:
            check_text("option producer", producer)
            if len(producer.encode()) > _NAME_BYTES_MAX:
                raise ClientFault(
                    f"option producer is {producer!r}: at most {_NAME_BYTES_MAX} bytes of UTF-8"
                )
        if given.get("level", "stored") != "stored":
            raise ClientFault(
                f"option level is {given['level']!r}: what Spark writes is always stored, or a task that is "
                "run again could not tell what is there"
            )
        return cls(
            BrokerLogin(url, given.get("token")),
            topic,
            producer,
            _deadline_s(given),
            dead_letter_topic,
            _flag(given, "sort"),
        )


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false"):
        raise ClientFault(f"option {name} is {text!r}: it must be true or false")
    return text == "true"


def _deadline_s(given: Mapping[str, str]) -> float:
    text = given.get("deadlineseconds", str(_DEFAULT_DEADLINE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ClientFault(
            f"option deadlineSeconds is {text!r}: it must be a number of seconds above 0"
        )
    return seconds


class TaskIdentity(NamedTuple):
    """The identity of a task's batches for the broker: the producer's name and term, and the Spark partition."""

    producer: str
    term: int
    partition: int


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("runnel").mode("append")`: writes each row once, however often its tasks run.

    The option `producer` names exactly these rows; then each row is written once however often the whole write runs.
    Within foreachBatch, the name together with the query and its batch identifies the rows, so it can stay the same.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise ClientFault('mode is "overwrite", but topics are only added to: mode("append")')
        self._options = WriteOptions.parse(options)
        check_schema(schema, has_topic=self._options.topic is not None)
        self._write_id = uuid.uuid4().hex  # the same in all tasks

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        context = current_task()
        partition = context.partitionId()
        name = self._options.producer
        if name is None:
            identity = TaskIdentity(f"{_DEFAULT_NAME}/{self._write_id}/{partition}", 1, partition)
        elif (query_id := context.getLocalProperty(_QUERY_ID)) is not None:
            identity = identity_in_query(name, query_id, context)
        else:
            identity = TaskIdentity(f"{name}/{partition}", 1, partition)
        return publish_rows(iterator, self._options, identity)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: every task's rows are stored."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: stored rows stay, because readers may have seen them."""


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("runnel")`: writes each micro-batch once, also after a restart from its checkpoint."""

    def __init__(
        self,
        options: Mapping[str, str],
        schema: StructType,
        *,
        overwrite: bool,  # noqa: ARG002 - the output mode `complete`: each micro-batch publishes all rows
    ) -> None:
        self._options = WriteOptions.parse(options)
        check_schema(schema, has_topic=self._options.topic is not None)

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        context = current_task()
        name = self._options.producer or _DEFAULT_NAME
        return publish_rows(
            iterator, self._options, identity_in_query(name, query_of(context), context)
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Does nothing: every task's rows are stored."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Does nothing: stored rows stay, because readers may have seen them, and the batch is repeated."""


def current_task() -> TaskContext:
    context = TaskContext.get()
    assert context is not None  # Spark calls `write` within tasks
    return context


def query_of(context: TaskContext) -> str:
    """The id of the streaming query that a task belongs to. The checkpoint keeps this id."""
    query_id = context.getLocalProperty(_QUERY_ID)
    if query_id is None:
        raise ClientFault(f"Spark does not say which query this is: {_QUERY_ID} is not set")
    return query_id


def identity_in_query(name: str, query_id: str, context: TaskContext) -> TaskIdentity:
    batch_id = context.getLocalProperty(_BATCH_ID)
    if batch_id is None:
        raise ClientFault(f"Spark does not say which batch this is: {_BATCH_ID} is not set")
    partition = context.partitionId()
    return TaskIdentity(f"{name}/{query_id}/{partition}", int(batch_id) + 1, partition)


def publish_rows(
    iterator: Iterator[pyarrow.RecordBatch], options: WriteOptions, identity: TaskIdentity
) -> RowsWritten:
    rows = in_repeatable_order(iterator) if options.sorts else iterator
    with publisher_to(options.address, options.deadline_s) as publisher:
        chunker = Chunker(
            identity.producer,
            identity.term,
            topic=options.topic,
            turn=identity.partition + identity.term,
            bytes_max=publisher.server.batch_bytes_max // 2,
            find_routes=publisher.find_routes,
            now_ns=time.time_ns,
            dead_letters=_dead_letters(options.dead_letter_topic, identity, publisher.server),
        )
        tally = publisher.publish(chunker.batches(rows))
    return RowsWritten(tally.rows, tally.rows_repeated)


def _dead_letters(
    topic: str | None, identity: TaskIdentity, server: Welcome
) -> RowDeadLetters | None:
    if topic is None:
        return None
    limits = Limits(server.message_bytes_max, server.batch_bytes_max)
    return RowDeadLetters(topic, f"producer {identity.producer}, term {identity.term}", limits)
