"""All resources of the door in one Litestar application."""

from __future__ import annotations

from functools import cache
from typing import Any

from litestar import Litestar, Request, Response
from litestar.exceptions import ValidationException
from litestar.types import ControllerRouterHandler

from runnel.doors.http.calls import call_of
from runnel.doors.http.cursors import cursor_handlers
from runnel.doors.http.health import health_handlers
from runnel.doors.http.live import live_handlers
from runnel.doors.http.metrics import metrics_handlers
from runnel.doors.http.page import page_handlers
from runnel.doors.http.problems import PROBLEM_TYPE, problem_bytes, problem_of
from runnel.doors.http.publishing import publish_handlers
from runnel.doors.http.reading import read_handlers
from runnel.doors.http.requests import CheckedParameters, DoorRequest, explained
from runnel.doors.http.statistics import watch_handlers
from runnel.doors.http.topics import topic_handlers
from runnel.doors.http.work import work_handlers

HANDLERS: list[ControllerRouterHandler] = [
    *publish_handlers,
    *read_handlers,
    *live_handlers,
    *work_handlers,
    *topic_handlers,
    *cursor_handlers,
    *watch_handlers,
    *metrics_handlers,
    *health_handlers,
]


@cache
def litestar_app() -> Litestar:
    """One for all doors of a process: a request brings its door along. Making it takes a while."""
    return Litestar(
        [*HANDLERS, *page_handlers(HANDLERS)],
        middleware=[CheckedParameters],
        request_class=DoorRequest,
        request_max_body_size=None,  # `read_body` sees to it, by the door's settings
        exception_handlers={Exception: _answer_problem},
        openapi_config=None,
        logging_config=None,
    )


def _answer_problem(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    call_of(request).door.broker.metrics.counters.requests_failed += 1
    if isinstance(error, ValidationException):
        error = explained(request, error)
    problem, headers = problem_of(error)
    return Response(
        problem_bytes(problem),
        media_type=PROBLEM_TYPE,
        status_code=problem.status,
        headers=dict(headers),
    )
