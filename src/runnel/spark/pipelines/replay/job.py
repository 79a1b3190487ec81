"""Runs a replay: plans it and records the plan, then Spark's tasks send the messages."""

from __future__ import annotations

import concurrent.futures
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from runnel.client import connect_blocking
from runnel.errors import ClientFault
from runnel.spark.connections import BrokerLogin
from runnel.spark.pipelines.replay.options import ReplayOptions, Time, check_options
from runnel.spark.pipelines.replay.plan import ReplayPart, rows_by_task
from runnel.spark.pipelines.replay.planner import STORED_ORDER, plan_replay, slots, with_due
from runnel.spark.pipelines.replay.progress import OnProgress, ProgressWatch
from runnel.spark.pipelines.replay.sender import RESULT_SCHEMA, TASK, Sender
from runnel.spark.pipelines.replay.sources import SENT, ReplaySource
from runnel.spark.pipelines.replay.state import ReplayState, StateDirectory
from runnel.spark.pipelines.replay.timetable import DUE, ByEventTime, ByRate, Timetable
from runnel.spark.pipelines.streaming_query import PipelineFailedError, failure_of

_DEFAULT_DEADLINE_S: Final = 120.0
_LOOK_EVERY_S: Final = 0.5


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay. `sent` and `already_there` count this run; together they are all `messages`."""

    messages: int
    sent: int
    already_there: int


def replay(
    spark: SparkSession,
    *,
    archive: str | None = None,
    path: str | None = None,
    url: str | None = None,
    token: str | None = None,
    topics: str | Iterable[str] | None = None,
    pattern: str | None = None,
    since: Time | None = None,
    until: Time | None = None,
    offsets: Mapping[tuple[str, int], range] | None = None,
    tags: Mapping[str, str] | None = None,
    where: str | None = None,
    rename: Mapping[str, str] | Iterable[str] = (),
    into_url: str | None = None,
    into_token: str | None = None,
    into_existing: bool = False,
    speed: float | None = None,
    rate: float | None = None,
    gap_max_s: float | None = None,
    tasks: int | None = None,
    checkpoint: str | None = None,
    deadline_s: float = _DEFAULT_DEADLINE_S,
    on_progress: OnProgress | None = None,
) -> ReplayResult:
    """Publish stored messages again: in order within each partition, with their own times, keys, tags and uids.

    Reads an `archive`, the files of a broker (`path`), or the broker at `url`. Publishes to topics of the broker at
    `into_url`, or else `url`. `since` and `until` bound receive times; `where` is a condition in SQL.

    Sends as fast as possible, or at `speed` times the pace of event times (waiting at most `gap_max_s`), or at `rate`
    messages per second. With a `checkpoint` directory, the same call resumes a replay that was interrupted; a replay
    that is done is not repeated.
    """
    options = check_options(
        archive=archive,
        path=path,
        url=url,
        into_url=into_url,
        topics=topics,
        pattern=pattern,
        since=since,
        until=until,
        offsets=offsets,
        tags=tags,
        where=where,
        rename=rename,
        speed=speed,
        rate=rate,
        gap_max_s=gap_max_s,
    )
    return run_replay(
        spark,
        options,
        token=token,
        into_token=token if into_url is None else into_token,
        into_existing=into_existing,
        tasks=tasks,
        checkpoint=checkpoint,
        deadline_s=deadline_s,
        on_progress=on_progress,
    )


def run_replay(
    spark: SparkSession,
    options: ReplayOptions,
    *,
    token: str | None = None,
    into_token: str | None = None,
    into_existing: bool = False,
    tasks: int | None = None,
    checkpoint: str | None = None,
    deadline_s: float = _DEFAULT_DEADLINE_S,
    on_progress: OnProgress | None = None,
) -> ReplayResult:
    """Run a replay with options that were checked before the session was started."""
    if tasks is not None and tasks < 1:
        raise ClientFault(f"tasks is {tasks}: it must be a number from 1 on")
    source = ReplaySource(options, token)
    target = BrokerLogin(options.into_url, into_token)
    with _directory(checkpoint) as directory, _plain_errors():
        state = directory.load(options)
        if state is None:
            # Connects first, because otherwise all reading could be in vain.
            with connect_blocking(target.url, token=target.token) as bus:
                state = plan_replay(
                    spark,
                    source,
                    bus,
                    tasks_max=tasks or slots(spark),
                    into_existing=into_existing,
                )
            directory.begin(state)
        if state.is_done:
            return ReplayResult(messages=state.rows, sent=0, already_there=state.rows)
        result = _send(spark, source, state, directory, target, deadline_s, on_progress)
        directory.save(msgspec.structs.replace(state, is_done=True))
        return result


@contextmanager
def _directory(checkpoint: str | None) -> Iterator[StateDirectory]:
    if checkpoint is not None:
        yield StateDirectory.at(checkpoint)
        return
    with tempfile.TemporaryDirectory(prefix="runnel-replay-") as temporary:
        yield StateDirectory.at(temporary)


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except PySparkException as error:
        raise failure_of(error) from error


# --- Sending the planned messages ---


def _send(
    spark: SparkSession,
    source: ReplaySource,
    state: ReplayState,
    directory: StateDirectory,
    target: BrokerLogin,
    deadline_s: float,
    on_progress: OnProgress | None,
) -> ReplayResult:
    task_rows = rows_by_task(state.parts)
    timetables = _timetables(state, task_rows)
    if timetables and (room := slots(spark)) < len(task_rows):
        raise ClientFault(
            f"this replay is paced by {len(task_rows)} tasks that run at once, and this session has room for {room}: "
            "give Spark more cores, or begin anew in another directory"
        )
    sender = Sender(
        address=target,
        deadline_s=deadline_s,
        replay_id=state.replay_id,
        directory=directory,
        timetables=timetables,
    )
    watch = ProgressWatch(state, directory, len(task_rows))

    def report() -> None:
        if on_progress is not None:
            on_progress(watch.look())

    sending = _in_order(spark, source, state, len(task_rows)).mapInArrow(
        lambda rows: sender.send(rows), RESULT_SCHEMA, barrier=bool(timetables)
    )
    results = _collected(spark, sending, report)
    report()
    rows = sum(row["rows"] for row in results)
    if rows != state.rows:
        raise PipelineFailedError(
            f"{state.rows:,} messages were to be replayed, and {rows:,} were found: what is read has changed since "
            "the replay began"
        )
    repeated = sum(row["rows_there"] for row in results)
    return ReplayResult(messages=rows, sent=rows - repeated, already_there=repeated)


def _timetables(state: ReplayState, task_rows: tuple[int, ...]) -> tuple[Timetable, ...]:
    options = state.options
    if options.speed is not None:
        return (ByEventTime(state.first_ns, options.speed, state.cuts),) * len(task_rows)
    if options.rate is not None:
        # In proportion to their rows, so that all tasks end together.
        return tuple(ByRate(options.rate * rows / state.rows) for rows in task_rows)
    return ()


def _in_order(
    spark: SparkSession, source: ReplaySource, state: ReplayState, tasks: int
) -> DataFrame:
    """The rows of each task in one Spark partition, always in the same order."""
    due = (DUE,) if state.options.speed is not None else ()
    rows = source.rows(spark, SENT, state.parts).join(
        f.broadcast(_plan(spark, state.parts)), ["topic", "partition"]
    )
    rows = rows.where((f.col("offset") >= f.col("begin")) & (f.col("offset") < f.col("end")))
    partition = (
        f.when(f.col("keeps_partition"), f.col("partition"))
        # Rows without a key: those of one partition stay together, or they would lose their order.
        .when(f.col("key").isNull(), f.col("partition") % f.col("into_partitions"))
    )
    return (
        with_due(rows, state.options)
        .repartitionById(tasks, f.col(TASK))
        .sortWithinPartitions(*due, *STORED_ORDER)
        .select(
            TASK,
            f.col("into").alias("topic"),
            partition.alias("partition"),
            *("key", "payload", "tags", "event_time_ns", "transmit_time_ns", "uid"),
            *due,
        )
    )


def _plan(spark: SparkSession, parts: Iterable[ReplayPart]) -> DataFrame:
    rows = [
        (
            part.found.topic,
            part.found.partition,
            part.found.begin,
            part.found.end,
            part.task,
            part.target.topic,
            part.target.partitions,
            part.target.keeps_partition,
        )
        for part in parts
    ]
    return spark.createDataFrame(
        rows,
        f"topic string, partition int, begin bigint, end bigint, {TASK} int, into string, into_partitions int, "
        "keeps_partition boolean",
    )


def _collected(spark: SparkSession, frame: DataFrame, meanwhile: Callable[[], object]) -> list[Row]:
    """Collect a query's rows, calling `meanwhile` repeatedly. If it fails, or at Ctrl-C, cancels the query."""
    name = f"runnel-replay-{uuid.uuid4().hex}"
    # There are two ways to cancel a job, and each kind of session supports one.
    is_remote = type(spark).__module__.startswith("pyspark.sql.connect")

    def collect() -> list[Row]:
        if is_remote:
            spark.addTag(name)
        else:
            spark.sparkContext.setJobGroup(name, "replay", interruptOnCancel=True)
        return frame.collect()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        collecting = thread.submit(collect)
        try:
            while not concurrent.futures.wait((collecting,), _LOOK_EVERY_S).done:
                meanwhile()
        except BaseException:
            if is_remote:
                spark.interruptTag(name)
            else:
                spark.sparkContext.cancelJobGroup(name)
            raise
        return collecting.result()
