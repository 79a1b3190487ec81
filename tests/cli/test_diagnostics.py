"""Diagnostics: each is one line, whatever names clients choose, and none contains a secret."""

from __future__ import annotations

import io
import json
import logging
import secrets
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import pytest

from runnel.cli.diagnostics import LogFormat, configure
from runnel.config import LogLevel
from runnel.platform.diagnostics import get_logger

HOSTILE = "a\n2026-01-01T00:00:00Z [info] all is well\r\x1b[2J\x9b1m\u2028\u202e\udcff"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def configured(
    form: LogFormat, level: LogLevel = LogLevel.INFO, stderr: io.StringIO | None = None
) -> Iterator[io.StringIO]:
    """Diagnostics that go to a standard error of our own; afterwards logging is as it was."""
    root, ours = logging.getLogger(), logging.getLogger("runnel")
    handlers, levels, hook = root.handlers[:], (root.level, ours.level), threading.excepthook
    with redirect_stderr(stderr or io.StringIO()) as written:
        try:
            root.handlers[:] = []  # or they would be closed
            configure(form, level)
            yield written
        finally:
            logging.captureWarnings(capture=False)
            root.handlers[:] = handlers
            root.setLevel(levels[0])
            ours.setLevel(levels[1])
            threading.excepthook = hook


def lines(written: io.StringIO) -> list[str]:
    return written.getvalue().splitlines()


def test_without_a_terminal_lines_are_json() -> None:
    with configured(LogFormat.AUTO) as stderr:
        get_logger("runnel").info("shutting down", connections=3)
    (line,) = lines(stderr)
    told = json.loads(line)
    assert (told["event"], told["connections"], told["level"]) == ("shutting down", 3, "info")


def test_on_a_terminal_lines_are_for_people() -> None:
    with configured(LogFormat.AUTO, stderr=Terminal()) as stderr:
        get_logger("runnel").info("shutting down", connections=3)
    (line,) = lines(stderr)
    assert "shutting down" in line
    assert "\x1b[" in line  # colours
    assert not line.startswith("{")


@pytest.mark.parametrize("form", [LogFormat.TEXT, LogFormat.JSON])
def test_names_of_clients_can_forge_no_line_and_steer_no_terminal(
    form: LogFormat,
) -> None:
    with configured(form) as stderr:
        get_logger("runnel").warning("a reader cannot keep up", subject=HOSTILE, patterns=[HOSTILE])
        logging.getLogger("uvicorn.error").warning("Invalid request from %s", HOSTILE)
    assert len(lines(stderr)) == 2
    assert set(stderr.getvalue()) - {"\n"} == {
        character for character in stderr.getvalue() if character.isprintable()
    }
    if form is LogFormat.JSON:
        first = json.loads(stderr.getvalue().split("\n")[0])
        assert first["subject"] == HOSTILE  # decoding gives the same text
    else:
        assert (
            r"a\n2026-01-01T00:00:00Z [info] all is well\r\x1b[2J\x9b1m\u2028\u202e"
            in lines(stderr)[0]
        )


@pytest.mark.parametrize("form", [LogFormat.TEXT, LogFormat.JSON])
def test_traceback_that_quotes_a_client_forges_no_line(form: LogFormat) -> None:
    payload = b"a payload that is nobody's business"
    with configured(form) as stderr:
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            get_logger("runnel").exception("a session failed", peer="127.0.0.1:5")
    assert payload.decode() not in stderr.getvalue()
    first, *rest = lines(stderr)
    assert "a session failed" in first
    assert all(line.startswith("  ") for line in rest)
    assert "\x1b" not in stderr.getvalue()
    assert "Traceback" in stderr.getvalue() or form is LogFormat.JSON


@pytest.mark.parametrize("form", [LogFormat.TEXT, LogFormat.JSON])
def test_token_in_a_line_is_cut(form: LogFormat) -> None:
    text = f"runnel_{secrets.token_hex(8)}_{secrets.token_urlsafe(32)}"
    secret = text.split("_", 2)[2]
    with configured(form) as stderr:
        logging.getLogger("uvicorn.error").warning("GET /v1/stream?access_token=%s", text)
        get_logger("runnel").warning("refused", shown=[text], error=f"no token: {text!r}")
        try:
            raise ValueError(text)
        except ValueError:
            get_logger("runnel").exception("failed")
    assert len(lines(stderr)) >= 3
    assert secret not in stderr.getvalue()
    assert "ValueError" in stderr.getvalue()  # the traceback is there
    assert f"runnel_{text.split('_')[1]}_…" in stderr.getvalue()


def test_what_libraries_warn_of_looks_the_same_and_names_the_library() -> None:
    with warnings.catch_warnings(), configured(LogFormat.JSON, LogLevel.DEBUG) as stderr:
        for name in ("uvicorn.error", "litestar", "grpc._cython.cygrpc", "asyncio"):
            logging.getLogger(name).warning("something of %s", name)
            logging.getLogger(name).info("nobody needs this")
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    told = [json.loads(line) for line in lines(stderr)]
    assert [line["logger"] for line in told] == [
        "uvicorn.error",
        "litestar",
        "grpc._cython.cygrpc",
        "asyncio",
        "py.warnings",
    ]
    assert all({"event", "level", "timestamp"} <= line.keys() for line in told)


def test_thread_that_fails_is_reported_in_a_line() -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    with configured(LogFormat.JSON) as stderr:
        thread = threading.Thread(target=fail, name="writer-1")
        thread.start()
        thread.join()
    (line,) = lines(stderr)
    assert json.loads(line)["event"] == "thread writer-1 failed"
