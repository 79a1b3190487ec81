"""Where diagnostics go and what they look like: standard error, for people or as JSON. Configured only here.

What clients call themselves, their topics and their subscriptions stand in these lines. So every line is made safe
where it is written: characters that end a line or steer a terminal are escaped, and whatever looks like a token is cut.
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

# structlog imports rich if it is there, for tracebacks that we do not use: an eighth of a broker's start. With None in
# its place that import fails; whoever else wants rich imports it later.
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
    """Lines for people, or a JSON object a line."""

    AUTO = "auto"  # text on a terminal, JSON elsewhere
    TEXT = "text"
    JSON = "json"


def configure(form: LogFormat, level: LogLevel) -> None:
    """For this process. What libraries say looks the same; of them only warnings are told."""
    if form is LogFormat.AUTO:
        form = LogFormat.TEXT if _is_terminal() else LogFormat.JSON
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                _unfold,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_last_steps(form),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)
    logging.captureWarnings(capture=True)
    threading.excepthook = _tell_thread
    # The core of gRPC writes to standard error itself, past every logger; what matters comes as an error of a call.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def set_level(level: LogLevel) -> None:
    """From now on. Of libraries nothing below warnings is told, whatever the level."""
    numeric = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger().setLevel(max(numeric, logging.WARNING))
    logging.getLogger("runnel").setLevel(numeric)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _tell_thread(failed: threading.ExceptHookArgs) -> None:
    logging.getLogger("runnel").error(
        "thread %s failed",
        "?" if failed.thread is None else failed.thread.name,
        exc_info=failed.exc_value,
    )


def _unfold(logger: object, method: str, line: EventDict) -> EventDict:  # noqa: ARG001 - structlog's signature
    """Our own lines come with their fields (`runnel.platform.diagnostics`); those of a library with its name."""
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
            # Without the variables of each frame, which dict_tracebacks would show: there are payloads among them.
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
            # Plain ones: nothing to import, and they can be grepped and pasted.
            exception_formatter=_write_traceback,
        ),
    ]


# --- Safe lines ---

# What ends a line or steers a terminal: control characters, line and paragraph separators, marks that turn the
# direction of writing, and surrogates, which have no UTF-8.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# See `runnel.security.tokens`. The id stays, so that one sees whose it was.
_TOKEN: Final = re.compile(r"(runnel_[0-9a-f]{4,64}_)[\w-]{8,}")
_CUT: Final = r"\1…"


def safe(text: str) -> str:
    """In one line, as anybody may see it."""
    return _TOKEN.sub(_CUT, _UNSAFE.sub(_escaped, text))


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode("ascii")


def _escaped_in_json(found: re.Match[str]) -> str:
    return f"\\u{ord(found.group()):04x}"


def _safe_fields(logger: object, method: str, line: EventDict) -> EventDict:  # noqa: ARG001 - structlog's signature
    fields = {
        # A traceback is made safe as it is written.
        name: value if name == "exc_info" else _safe_value(value)
        for name, value in line.items()
    }
    return {**fields, "event": safe(str(line["event"]))}


def _safe_value(value: object) -> object:
    """As it is if nothing is wrong with it; the renderer quotes what has to be quoted."""
    text = value if isinstance(value, str) else repr(value)
    made_safe = safe(text)
    if made_safe == text:
        return value
    return _Shown(f"'{made_safe}'" if isinstance(value, str) else made_safe)


class _Shown:
    """A text that the renderer shows as it is, and does not escape once more."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_json: Final = structlog.processors.JSONRenderer(ensure_ascii=False, default=str)


def _write_json(logger: object, method: str, line: EventDict) -> str:
    """JSON escapes by itself what is below a blank; the rest stays the same text for whoever decodes it."""
    written = str(_json(logger, method, line))
    return _TOKEN.sub(_CUT, _UNSAFE.sub(_escaped_in_json, written))


def _write_traceback(sio: TextIO, exc_info: ExcInfo) -> None:
    """Every line of it is indented: what an error quotes of a client cannot pass for a line of ours."""
    written = StringIO()
    structlog.dev.plain_traceback(written, exc_info)
    for line in written.getvalue().splitlines():
        sio.write(f"\n  {safe(line)}")
