"""Builds the Litestar application with all resources of the HTTP listener."""

from __future__ import annotations

from functools import cache
from typing import Any

from litestar import Litestar, Request, Response, route
from litestar.exceptions import ValidationException
from litestar.handlers import HTTPRouteHandler
from litestar.types import ControllerRouterHandler

from runnel.protocols.http.encoding.problems import PROBLEM_TYPE, problem_bytes, problem_of
from runnel.protocols.http.resources.cursors import cursor_handlers
from runnel.protocols.http.resources.health import health_handlers
from runnel.protocols.http.resources.live import live_handlers
from runnel.protocols.http.resources.messages import read_handlers
from runnel.protocols.http.resources.metrics import metrics_handlers
from runnel.protocols.http.resources.page import page_handlers
from runnel.protocols.http.resources.publish import publish_handlers
from runnel.protocols.http.resources.statistics import monitoring_handlers
from runnel.protocols.http.resources.topics import topic_handlers
from runnel.protocols.http.resources.work import work_handlers
from runnel.protocols.http.server.answers import Answer
from runnel.protocols.http.server.calls import call_of
from runnel.protocols.http.server.requests import HttpRequest, explained

HANDLERS: list[ControllerRouterHandler] = [
    *publish_handlers,
    *read_handlers,
    *live_handlers,
    *work_handlers,
    *topic_handlers,
    *cursor_handlers,
    *monitoring_handlers,
    *metrics_handlers,
    *health_handlers,
]


@cache
def litestar_app() -> Litestar:
    """All listeners of a process share one application, because building it is slow. A request carries its listener."""
    return Litestar(
        [*_options(), *HANDLERS, *page_handlers(HANDLERS)],
        request_class=HttpRequest,
        request_max_body_size=None,  # `read_body` limits it, by the listener's settings
        exception_handlers={Exception: _answer_problem},
        openapi_config=None,
        logging_config=None,
    )


def _options() -> list[ControllerRouterHandler]:
    """OPTIONS handlers that list all methods of each resource. Litestar's own list those of the first handler only."""
    methods: dict[str, set[str]] = {}
    for handler in HANDLERS:
        assert isinstance(handler, HTTPRouteHandler)
        for path in handler.paths:
            methods.setdefault(path, {"OPTIONS"}).update(handler.http_methods)
    return [_options_of(path, ", ".join(sorted(found))) for path, found in methods.items()]


def _options_of(path: str, methods: str) -> HTTPRouteHandler:
    answer = Answer(status=204, headers=(("allow", methods),))

    @route(
        path,
        http_method=["OPTIONS"],
        status_code=200,
        include_in_schema=False,
        sync_to_thread=False,
    )
    def options() -> Answer:
        return answer

    return options


def _answer_problem(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    call_of(request).server.broker.metrics.counters.requests_failed += 1
    if isinstance(error, ValidationException):
        error = explained(request, error)
    problem, headers = problem_of(error, call_of(request).peer)
    return Response(
        problem_bytes(problem),
        media_type=PROBLEM_TYPE,
        status_code=problem.status,
        headers=dict(headers),
    )
