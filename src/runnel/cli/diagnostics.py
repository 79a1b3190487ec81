"""Where diagnostics go and what they look like: standard error, for people or as JSON. Configured only here."""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor


class LogFormat(enum.StrEnum):
    """Lines for people, or a JSON object a line."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """What is told: a level and everything above it."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure(form: LogFormat, level: LogLevel) -> None:
    """For this process. What libraries say looks the same; of them only warnings are told."""
    numeric = logging.getLevelNamesMapping()[level.upper()]
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
    logging.basicConfig(level=max(numeric, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("runnel").setLevel(numeric)


def _unfold(logger: object, method: str, line: EventDict) -> EventDict:  # noqa: ARG001 - structlog's signature
    """Our own lines come with their fields (`runnel.world.diagnostics`)."""
    record: logging.LogRecord = line["_record"]
    fields: Mapping[str, object] | None = getattr(record, "fields", None)
    if fields is None or not record.name.startswith("runnel"):
        return line
    return {**fields, **line, "event": getattr(record, "event", line["event"])}


def _last_steps(form: LogFormat) -> list[Processor]:
    if form is LogFormat.JSON:
        return [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(ensure_ascii=False, default=str),
        ]
    has_colours = sys.stderr is not None and sys.stderr.isatty()
    return [
        structlog.dev.ConsoleRenderer(
            colors=has_colours,
            pad_event_to=0,
            # Plain ones: nothing to import, and they can be grepped and pasted.
            exception_formatter=structlog.dev.plain_traceback,
        )
    ]
