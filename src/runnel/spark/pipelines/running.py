"""Deprecated name of `runnel.spark.pipelines.streaming_query`, kept for programs that import from here."""

from runnel.spark.pipelines.streaming_query import (
    PipelineFailedError,
    PipelineProgress,
    PipelineRefusedError,
    PipelineUnavailableError,
    failure_of,
    reason_of,
)

Progress = PipelineProgress

__all__ = [
    "PipelineFailedError",
    "PipelineRefusedError",
    "PipelineUnavailableError",
    "Progress",
    "failure_of",
    "reason_of",
]
