"""Spark's data source `runnel`: the entry of `spark.read`, `spark.readStream`, `df.write` and `df.writeStream`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from runnel.errors import ClientFault
from runnel.spark.runtime.fault_text import faults_without_trace

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

FORMAT: Final = "runnel"
# The program that plans a read if `spark.sql.python.filterPushdown.enabled` is set and the query has filters.
_PUSHDOWN_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class RunnelDataSource(DataSource):
    """Messages of topics as rows, and rows as messages. Each method imports what it needs."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> StructType:
        from runnel.spark.read.schema import SPARK_SCHEMA

        return SPARK_SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        from runnel.spark.connections import default_url
        from runnel.spark.options import batch_options
        from runnel.spark.read.batch_reader import BatchReader, PushdownBatchReader
        from runnel.spark.read.schema import arrow_schema

        with faults_without_trace():
            options = batch_options(dict(self.options), url=default_url())
            kind = PushdownBatchReader if _pushes_filters() else BatchReader
            return kind(options, arrow_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from runnel.spark.connections import default_url
        from runnel.spark.options import stream_options
        from runnel.spark.read.schema import arrow_schema
        from runnel.spark.read.stream_reader import RefusedStream, StreamReader

        try:
            options = stream_options(dict(self.options), url=default_url())
            return StreamReader(options, arrow_schema(schema))
        except ClientFault as fault:
            return RefusedStream(fault)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: FBT001
        from runnel.spark.write.writer import BatchWriter

        with faults_without_trace():
            return BatchWriter(dict(self.options), schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamArrowWriter:
        from runnel.spark.write.writer import StreamWriter

        with faults_without_trace():
            return StreamWriter(dict(self.options), schema, overwrite=overwrite)


def _pushes_filters() -> bool:
    """Whether Spark will push filters down. Only the program that creates the reader shows this."""
    if _PUSHDOWN_WORKER in sys.modules:
        return True
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == _PUSHDOWN_WORKER
