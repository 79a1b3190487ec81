"""Payloads as values."""

from __future__ import annotations

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from runnel.errors import ClientFault
from runnel.spark import json, text


@pytest.fixture
def messages(spark: SparkSession) -> DataFrame:
    payloads = [b'{"celsius": 21.5, "site": "n\xc3\xb6rd"}', b"not JSON", b"\xff\xfe"]
    return spark.createDataFrame(
        [(n, p) for n, p in enumerate(payloads)], "offset int, payload binary"
    )


def test_json_becomes_a_struct_and_what_is_none_becomes_null(messages: DataFrame) -> None:
    found = json(messages, "celsius double, site string").orderBy("offset").collect()
    assert [row.value for row in found] == [
        Row(celsius=21.5, site="nörd"),
        Row(celsius=None, site=None),
        Row(celsius=None, site=None),
    ]
    assert found[0].payload == b'{"celsius": 21.5, "site": "n\xc3\xb6rd"}'


def test_json_that_cannot_be_parsed_can_be_kept_or_end_the_query(messages: DataFrame) -> None:
    kept = json(messages, "celsius double, _corrupt_record string", into="reading")
    (row,) = kept.where("offset = 1").collect()
    assert row.reading._corrupt_record == "not JSON"
    with pytest.raises(Exception, match="FAILFAST"):
        json(messages, "celsius double", options={"mode": "FAILFAST"}).collect()


def test_text_replaces_what_is_not_utf_8(messages: DataFrame) -> None:
    values = [row.value for row in text(messages).orderBy("offset").collect()]
    assert values == ['{"celsius": 21.5, "site": "nörd"}', "not JSON", "\ufffd\ufffd"]


def test_rows_without_a_payload_are_reported(messages: DataFrame) -> None:
    with pytest.raises(ClientFault, match="no column payload to take apart, only offset"):
        text(messages.select("offset"))
