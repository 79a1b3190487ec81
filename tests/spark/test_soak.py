"""A short seeded round of what bin/soak does at length: a stream through Spark whose workers do not grow."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.soak.spark import watch_stream


@pytest.mark.slow
def test_a_stream_from_topics_to_a_topic_loses_nothing_and_does_not_grow(
    spark: SparkSession, tmp_path: Path
) -> None:
    outcome = watch_stream(spark, tmp_path, 1.5, seed=1)
    assert outcome.workers
