"""What becomes of a pipeline that Spark ended: whose fault it was, and the sentence that says so. Without Spark."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from runnel.errors import ClientFault, RunnelError, Unavailable
from runnel.spark.pipelines.streaming_query import PipelineFailedError, failure_of

WRAPPED = """[STREAM_FAILED] Query terminated with exception: Traceback (most recent call last):
  File "/x/link.py", line 113, in connect
ConnectionRefusedError: [Errno 111] Connection refused

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/x/stream_reader.py", line 138, in prepareForTriggerAvailableNow
{last}
 SQLSTATE: 38000
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.x(QueryExecutionErrors.scala:1890)
"""


@pytest.mark.parametrize(
    ("last", "kind", "sentence"),
    [
        ("runnel.errors.Unavailable: nobody there", Unavailable, "nobody there"),
        ("runnel.errors.ConnectionLostError: went away", Unavailable, "went away"),
        ("runnel.errors.UnknownTopicError: no topic a", ClientFault, "no topic a"),
        ("runnel.errors.CorruptionError: bad bytes", RunnelError, "bad bytes"),
        ("ValueError: of mine", RunnelError, "of mine"),
        (
            "_internal.TableNotFoundError: no directory x\nError: Os { code: 2 }",
            RunnelError,
            "no directory x",
        ),
    ],
)
def test_a_failure_is_of_the_kind_of_its_cause_and_says_its_sentence(
    last: str, kind: type[RunnelError], sentence: str
) -> None:
    failure = failure_of(PySparkException(WRAPPED.format(last=last)))
    assert str(failure) == sentence
    assert isinstance(failure, PipelineFailedError)
    assert isinstance(failure, kind)
    assert failure.code == "pipeline_failed"
    assert isinstance(failure, ClientFault | Unavailable) == (kind is not RunnelError)
    assert failure.retriable == (kind is Unavailable)


def test_what_spark_says_of_itself_is_told_without_plan_and_trace() -> None:
    error = PySparkException("[TABLE_NOT_FOUND] no table\nJVM stacktrace:\n\tat x")
    assert str(failure_of(error)) == "[TABLE_NOT_FOUND] no table"


def test_a_second_query_with_the_same_checkpoint_is_told_of_the_first() -> None:
    error = PySparkException(
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: [CONCURRENT_STREAM_LOG_UPDATE] "
        "Concurrent update to the log. Multiple streaming jobs detected for 0.\nPlease make sure SQLSTATE: 40000"
    )
    failure = failure_of(error)
    assert "another query runs with this checkpoint" in str(failure)
    assert isinstance(failure, Unavailable)


def test_the_ids_of_a_failed_query_are_left_out() -> None:
    error = PySparkException(
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: why"
    )
    assert str(failure_of(error)) == "why"
