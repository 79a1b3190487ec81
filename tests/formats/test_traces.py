"""W3C trace context: what is taken for one, and how it becomes tags."""

from __future__ import annotations

import pytest

from runnel.formats.traces import is_traceparent, is_tracestate, trace_tags

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STATE = "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"


@pytest.mark.parametrize(
    "text",
    [
        PARENT,
        PARENT[:-2] + "00",
        "cc" + PARENT[2:],  # of a version that is not known yet: read as far as it is known
        "cc" + PARENT[2:] + "-what-the-future-will-be-like",
    ],
)
def test_traceparent(text: str) -> None:
    assert is_traceparent(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        PARENT.upper(),
        "ff" + PARENT[2:],
        PARENT + "-01",  # version 00 has four parts
        "cc" + PARENT[2:] + ".01",
        "cc" + PARENT[2:] + "-" + "a" * 300,
        "cc" + PARENT[2:] + "-a\n",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
        PARENT[:-1],
        PARENT + "\n",
        " " + PARENT,
        PARENT.replace("0af", "0\u0660f"),  # a digit, but not of ASCII
        PARENT.replace("-", "_"),
    ],
)
def test_what_is_no_traceparent(text: str) -> None:
    assert not is_traceparent(text)


@pytest.mark.parametrize(
    "text",
    [
        STATE,
        "a=1",
        "tenant@system=1",
        "0tenant@system=x y",
        "a=1, b=2 ,\tc=3",
        "a=1,,b=2",
        ",".join(f"k{number}=v" for number in range(32)),
    ],
)
def test_tracestate(text: str) -> None:
    assert is_tracestate(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " , ,",
        "a",
        "=1",
        "a=",
        "A=1",
        "0a=1",  # only a tenant may begin with a digit
        "a=1,a=2",
        "a=b=c",
        "a=\u00e9",
        "a=1\r\nset-cookie: x",
        ",".join(f"k{number}=v" for number in range(33)),
        "a=" + "v" * 511,
        "a@" + "s" * 15 + "=1",
    ],
)
def test_what_is_no_tracestate(text: str) -> None:
    assert not is_tracestate(text)


def test_context_of_a_request_becomes_tags() -> None:
    assert trace_tags(PARENT, STATE, None) == {"traceparent": PARENT, "tracestate": STATE}
    assert trace_tags(PARENT, None, {"unit": "C"}) == {"unit": "C", "traceparent": PARENT}


def test_message_that_has_a_context_keeps_it_and_gets_no_state_of_another() -> None:
    own = {"traceparent": PARENT.replace("0af", "1af")}
    assert trace_tags(PARENT, STATE, own) is own


def test_invalid_context_is_passed_over() -> None:
    tags = {"unit": "C"}
    assert trace_tags("00-nonsense", STATE, tags) is tags
    assert trace_tags(None, STATE, tags) is tags
    assert trace_tags(None, None, None) is None
    assert trace_tags(PARENT, "A=1", None) == {"traceparent": PARENT}


def test_tags_that_were_given_are_left_as_they_are() -> None:
    tags = {"unit": "C"}
    trace_tags(PARENT, STATE, tags)
    assert tags == {"unit": "C"}
