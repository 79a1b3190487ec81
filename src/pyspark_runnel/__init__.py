"""How Spark finds the format `runnel` without being told: by this module's name, and the class in it.

Spark imports every module named `pyspark_*` whenever a format is looked up, and one that fails hides the others. So
nothing is imported here but what Spark has loaded by then; the rest comes when the format is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """The format `runnel`: what `runnel.spark.source` does, imported when it is asked for."""

    @classmethod
    def name(cls) -> str:
        return "runnel"

    def schema(self) -> StructType | str:
        return self._source().schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        return self._source().reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return self._source().streamReader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:  # noqa: FBT001
        return self._source().writer(schema, overwrite)

    def streamWriter(  # noqa: N802 - Spark's name
        self,
        schema: StructType,
        overwrite: bool,  # noqa: FBT001
    ) -> DataSourceStreamWriter:
        return self._source().streamWriter(schema, overwrite)

    def _source(self) -> DataSource:
        from runnel.spark.source import RunnelDataSource

        return RunnelDataSource(self.options)
