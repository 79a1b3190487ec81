"""Diagnostics: lines of the standard library's logging, with fields that handlers can use."""

from __future__ import annotations

import logging

import pytest

from runnel.platform.diagnostics import get_logger

logger = get_logger("runnel.test")


def test_line_and_fields_are_for_plain_handlers_and_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger.warning("it failed", topic="a/b", error="no such file", count=3, patterns=["a", "b"])
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("runnel.test", logging.WARNING)
    assert record.getMessage() == (
        "it failed topic=a/b error='no such file' count=3 patterns=['a', 'b']"
    )
    assert vars(record)["event"] == "it failed"
    assert vars(record)["fields"] == {
        "topic": "a/b",
        "error": "no such file",
        "count": 3,
        "patterns": ["a", "b"],
    }


def test_line_break_in_a_field_does_not_begin_a_line(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("refused", topic="a\nb", empty="")
    assert caplog.messages == ["refused topic='a\\nb' empty=''"]


def test_percent_signs_are_no_placeholders(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("100% of %s", topic="%d")
    assert caplog.messages == ["100% of %s topic=%d"]


def test_place_and_traceback_are_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("a bug")
    except KeyError:
        logger.exception("it broke", peer="p")
    (record,) = caplog.records
    assert record.funcName == "test_place_and_traceback_are_the_callers"
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
    assert record.getMessage() == "it broke peer=p"


def test_suppressed_line_is_not_put_together(caplog: pytest.LogCaptureFixture) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise AssertionError("nobody listens")

    caplog.set_level(logging.WARNING, "runnel")
    logger.info("quiet", field=Unprintable())
    logger.debug("quieter", field=Unprintable())
    assert not caplog.records
