"""A stream that cannot be: its options or columns are wrong, and it says so at the first question.

Spark stops a reader when an error has come, also one that it never got: what `streamReader` raises is followed by an
error of Spark's own, which is the one that a user sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from runnel.errors import ClientFault
from runnel.spark.fault_text import faults_without_trace
from runnel.spark.stream_offset import Offset


class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, fault: ClientFault) -> None:
        self._fault = fault

    def _refuse(self) -> NoReturn:
        with faults_without_trace():
            raise self._fault

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        self._refuse()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: ARG002, N802 - Spark's name
        self._refuse()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        self._refuse()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._refuse()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # noqa: ARG002
        self._refuse()

    def read(self, partition: InputPartition) -> Iterator[tuple[object, ...]]:  # noqa: ARG002
        self._refuse()
