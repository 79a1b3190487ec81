"""The work of a replay's task: sends its rows to the broker in order, at their times, each once.

The producer is named by the replay and the task. Its batches are numbered and always cut in the same places, so the
broker drops batches that it already has. Batches that a progress file names as acknowledged are not sent at all. So a
broker that has forgotten the producer refuses the following batches, instead of storing everything twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

import msgspec
import pyarrow as pa
from pyspark import BarrierTaskContext

from runnel.formats.batch import Batch
from runnel.spark.connections import BrokerLogin
from runnel.spark.pipelines.replay.state import StateDirectory, TaskProgress
from runnel.spark.pipelines.replay.timetable import DUE, Pacer, Timetable, slots
from runnel.spark.write.chunks import Chunker
from runnel.spark.write.task_publisher import Tally, TaskPublisher, publisher_to

TASK: Final = "task"  # the column with the task that sends the row
RESULT_SCHEMA: Final = "task int, rows bigint, rows_there bigint"
_RESULT_ARROW_SCHEMA: Final = pa.schema(
    [("task", pa.int32()), ("rows", pa.int64()), ("rows_there", pa.int64())]
)
_TERM: Final = 1
_REPORT_EVERY_S: Final = 1.0


class Sender(msgspec.Struct, frozen=True, kw_only=True):
    """Spark sends it to the tasks. `timetables`: one for each task; empty: as fast as possible."""

    address: BrokerLogin
    deadline_s: float
    replay_id: str
    directory: StateDirectory
    timetables: tuple[Timetable, ...] = ()

    def send(self, incoming: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Send the rows of one task, which the column `TASK` names; yields one row with the result."""
        first = next((rows for rows in incoming if rows.num_rows), None)
        if first is None:
            return
        task: int = first.column(TASK)[0].as_py()
        with publisher_to(self.address, self.deadline_s) as publisher:
            delivery = _TaskDelivery(publisher, self.replay_id, self.directory, task)
            arriving = chain((first,), incoming)
            if self.timetables:
                _send_in_time(delivery, arriving, self.timetables[task])
            else:
                delivery.send(delivery.cut(map(_message_columns, arriving)))
            delivery.report_now()
        done = delivery.progress
        yield pa.record_batch(
            [[task], [done.rows], [done.rows_repeated]], schema=_RESULT_ARROW_SCHEMA
        )


def _send_in_time(
    delivery: _TaskDelivery, arriving: Iterable[pa.RecordBatch], timetable: Timetable
) -> None:
    # All tasks run at once, and each has its first rows before the clock of any task begins. The clock begins at the
    # furthest point that any task had reached. The other tasks had reached it too, or are late with rows due by then.
    reached = BarrierTaskContext.get().allGather(str(delivery.progress.reached_ns))
    pacer = Pacer(_Clock(), max(map(int, reached)))
    for burst in pacer.bursts(slots(arriving, timetable), delivery.report):
        # Each slot is cut separately, because timing decides which slots are sent together.
        delivery.send(
            chain.from_iterable(delivery.cut((_message_columns(slot.rows),)) for slot in burst)
        )


def _message_columns(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select([name for name in rows.schema.names if name not in (TASK, DUE)])


class _Clock:
    """The real clock."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    sleep = staticmethod(time.sleep)


class _TaskDelivery:
    """Sends one task's batches and reports its progress."""

    def __init__(
        self, publisher: TaskPublisher, replay_id: str, directory: StateDirectory, task: int
    ) -> None:
        self._publisher = publisher
        self._directory = directory if directory.is_there else None
        self._task = task
        self._chunker = Chunker(
            f"replay/{replay_id}/{task}",
            _TERM,
            topic=None,
            turn=0,  # unused, because every row has a key or names its partition
            bytes_max=publisher.server.batch_bytes_max // 2,
            find_routes=publisher.find_routes,
            now_ns=time.time_ns,
        )
        known = TaskProgress() if self._directory is None else self._directory.progress(task)
        self._batches_known = known.batches
        self._reached_ns = known.reached_ns
        self._passed = Tally()
        self._tally = Tally()
        self._reported_at_s = time.monotonic()

    @property
    def progress(self) -> TaskProgress:
        passed, tally = self._passed, self._tally
        return TaskProgress(
            batches=max(passed.batches + tally.batches, self._batches_known),
            rows=passed.rows + tally.rows,
            rows_repeated=passed.rows + tally.rows_repeated,
            reached_ns=self._reached_ns,
        )

    def cut(self, rows: Iterable[pa.RecordBatch]) -> Iterator[Batch]:
        """Cut rows into the next batches."""
        return self._chunker.batches(rows)

    def send(self, batches: Iterable[Batch]) -> None:
        """Send batches; returns when all are acknowledged."""
        self._publisher.publish(self._unsent(batches), self._tally)

    def _unsent(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if self._passed.batches < self._batches_known:
                self._passed.batches += 1
                self._passed.rows += len(batch)
            else:
                yield batch
            self.report(self._reached_ns)

    def report(self, reached_ns: int) -> None:
        """Report, about once a second, that everything due by `reached_ns` is acknowledged."""
        self._reached_ns = reached_ns
        if time.monotonic() - self._reported_at_s >= _REPORT_EVERY_S:
            self.report_now()

    def report_now(self) -> None:
        self._reported_at_s = time.monotonic()
        if self._directory is not None:
            self._directory.report(self._task, self.progress)
