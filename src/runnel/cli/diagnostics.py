"""Where diagnostics go and what they look like: standard error, for people or as JSON. Configured only here."""

from __future__ import annotations

import enum
import logging
import sys
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor


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
    """For this process. What libraries say through the standard library looks the same."""
    numeric = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last = _last_steps(form)
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(level=max(numeric, logging.WARNING), handlers=[handler], force=True)


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
