"""Configures diagnostics: log lines on standard error, as text for people or as JSON.

Log lines contain names that clients chose: of clients, topics and subscriptions. So every line is made safe where
it is written: characters that end a line or control a terminal are escaped, and anything that looks like a token is
cut.
"""

from __future__ import annotations

import enum
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from io import StringIO
from typing import TYPE_CHECKING, Final

from runnel.config import LogLevel

# structlog imports rich, if installed, for tracebacks that Runnel does not use: an eighth of a broker's start time.
# With None in sys.modules that import fails; other code can import rich later.
_rich = sys.modules.get("rich")
sys.modules["rich"] = None  # type: ignore[assignment]
try:
    import structlog
finally:
    if _rich is None:
        del sys.modules["rich"]
    else:
        sys.modules["rich"] = _rich

if TYPE_CHECKING:
    from typing import TextIO

    from structlog.typing import EventDict, ExcInfo, Processor


class LogFormat(enum.StrEnum):
    """How log lines look: text for people, or one JSON object per line."""

    AUTO = "auto"  # text on a terminal, JSON elsewhere
    TEXT = "text"
    JSON = "json"


def configure(form: LogFormat, level: LogLevel, *, node: str | None = None) -> None:
    """Configure logging of this process. Libraries log in the same format, but only warnings and errors.

    Every line names the `node`, if this process is one of several.
    """
    form = resolved(form)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                _unfold,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[
                *([] if node is None else [_naming(node)]),
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_last_steps(form),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)
    logging.captureWarnings(capture=True)
    threading.excepthook = _tell_thread
    # The gRPC core writes to standard error directly, past every logger. Important errors also arrive as errors of
    # calls.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def resolved(form: LogFormat) -> LogFormat:
    """The format, with AUTO decided by where the lines go."""
    if form is not LogFormat.AUTO:
        return form
    return LogFormat.TEXT if _is_terminal() else LogFormat.JSON


def set_level(level: LogLevel) -> None:
    """Change the level from now on. Libraries log nothing below warnings, whatever the level."""
    numeric = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(numeric, logging.WARNING))
    logging.getLogger("runnel").setLevel(numeric)


def _naming(node: str) -> Processor:
    def name(logger: object, method: str, line: EventDict) -> EventDict:  # noqa: ARG001 - structlog's signature
        return {"node": node, **line}

    return name


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _tell_thread(failed: threading.ExceptHookArgs) -> None:
    logging.getLogger("runnel").error(
        "thread %s failed",
        "?" if failed.thread is None else failed.thread.name,
        exc_info=failed.exc_value,
    )


def _unfold(logger: object, method: str, line: EventDict) -> EventDict:  # noqa: ARG001 - structlog's signature
    """Take the fields of Runnel's own lines (`runnel.platform.diagnostics`); name the logger of a library's line."""
    record: logging.LogRecord = line["_record"]
    if not record.name.startswith("runnel"):
        return {**line, "logger": record.name}
    fields: Mapping[str, object] | None = getattr(record, "fields", None)
    if fields is None:
        return line
    return {**fields, **line, "event": getattr(record, "event", line["event"])}


def _last_steps(form: LogFormat) -> list[Processor]:
    if form is LogFormat.JSON:
        return [
            # Without local variables, which dict_tracebacks would show: payloads are among them.
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            ),
            _write_json,
        ]
    return [
        _safe_fields,
        structlog.dev.ConsoleRenderer(
            colors=_is_terminal() and not os.environ.get("NO_COLOR"),
            pad_event_to=0,
            # Plain tracebacks: they need no import, and users can grep and paste them.
            exception_formatter=_write_traceback,
        ),
    ]


# --- Safe lines ---

# Characters that end a line or control a terminal: control characters, line and paragraph separators, marks that
# change the direction of writing, and surrogates, which have no UTF-8.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# The format is described in `runnel.security.tokens`. The id stays, so that the line shows which token it was.
_TOKEN: Final = re.compile(r"(runnel_[0-9a-f]{4,64}_)[\w-]{8,}")
_CUT: Final = r"\1…"


def safe(text: str) -> str:
    """Return the text on one line, without control characters and tokens."""
    return _TOKEN.sub(_CUT, _UNSAFE.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode("ascii")


def _escaped_in_json(found: re.Match[str]) -> str:
    return f"\\u{ord(found.group()):04x}"


def _safe_fields(logger: object, method: str, line: EventDict) -> EventDict:  # noqa: ARG001 - structlog's signature
    fields = {
        # `_write_traceback` makes tracebacks safe.
        name: value if name == "exc_info" else _safe_value(value)
        for name, value in line.items()
    }
    return {**fields, "event": safe(str(line["event"]))}


def _safe_value(value: object) -> object:
    """Return the value unchanged if it is safe; the renderer adds quotes where they are needed."""
    text = value if isinstance(value, str) else repr(value)
    made_safe = safe(text)
    if made_safe == text:
        return value
    return _Shown(f"'{made_safe}'" if isinstance(value, str) else made_safe)


class _Shown:
    """A text that is escaped already, which the renderer prints as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_json: Final = structlog.processors.JSONRenderer(ensure_ascii=False, default=str)


def _write_json(logger: object, method: str, line: EventDict) -> str:
    """Escape what JSON leaves: it escapes only characters below U+0020. The decoded text stays the same."""
    written = str(_json(logger, method, line))
    return _TOKEN.sub(_CUT, _UNSAFE.sub(_escaped_in_json, written))


def _write_traceback(sio: TextIO, exc_info: ExcInfo) -> None:
    """Indent every line, so that text of a client quoted in an error cannot look like a line of ours."""
    written = StringIO()
    structlog.dev.plain_traceback(written, exc_info)
    for line in written.getvalue().splitlines():
        sio.write(f"\n  {safe(line)}")
