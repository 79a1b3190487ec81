"""Valid and invalid requests from the OpenAPI document: the listener answers all as the document says.

The broker runs in its own thread, with a clock a thousand times as fast: a long poll takes only a moment.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

import runnel
from runnel.config import Authentication, HttpSettings, LogSettings, SecuritySettings, Settings
from runnel.protocols.http.app import HANDLERS
from runnel.protocols.http.listener import HttpListener
from runnel.protocols.http.resources.openapi import openapi_document
from runnel.security.rights import Grant
from runnel.security.tokens import TokenFile, new_token
from runnel.testing import VirtualClock

_TICK_S: Final = 0.001
_TICK_NS: Final = 1_000_000_000
# By that clock a connection is idle for minutes between two requests.
_NEVER_NS: Final = 10**18
_EVERYTHING: Final = [
    Grant.parse(f"{right}:{pattern}")
    for right in ("publish", "read", "consume", "admin")
    for pattern in ("*", "!*")
]
_CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
_EXAMPLES: Final = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)

DOCUMENT: Final[dict[str, Any]] = msgspec.json.decode(openapi_document(HANDLERS))
schema = schemathesis.openapi.from_dict(DOCUMENT)
# Endless, if it is answered at all: see below.
but_for_streams = schema.exclude(operation_id="stream")
Case: TypeAlias = schemathesis.Case[Any]
OPEN_TO_ALL: Final = {"health", "readiness"}


@schemathesis.serializer("application/x-ndjson")
def lines_of(context: Any, value: Any) -> bytes:
    """A message a line; what is no list of them is one line, and wrong."""
    lines = value if isinstance(value, list) else [value]
    return b"\n".join(
        line if isinstance(line, bytes) else msgspec.json.encode(line) for line in lines
    )


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and description of all that the document has."""
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield path, method.upper(), operation


def _named(value: object) -> str:
    return value if isinstance(value, str) else ""


class Served:
    """Where the scene is, and a token for it."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.headers = {"authorization": f"Bearer {token}"}


@contextmanager
def serving(directory: Path) -> Iterator[Served]:
    entry, token = new_token("all", _EVERYTHING, now_ns=0)
    with TokenFile(directory / "tokens.json").changing() as tokens:
        tokens.append(entry)
    configured = Settings(
        data="memory:",
        log=LogSettings(allocate_bytes=0, disk_reserve_bytes=0),
        http=HttpSettings(
            listen="127.0.0.1:0", idle_timeout_ns=_NEVER_NS, request_timeout_ns=_NEVER_NS
        ),
        security=SecuritySettings(
            authentication=Authentication.TOKEN, tokens_file=str(directory / "tokens.json")
        ),
    )
    told: list[str] = []
    is_up = threading.Event()
    stop: list[Any] = []

    async def serve() -> None:
        clock = VirtualClock()
        stopped = asyncio.Event()
        stop.extend((asyncio.get_running_loop(), stopped.set))
        async with runnel.Broker.open(configured, clock=clock) as broker:
            listener = await HttpListener.open(broker._core, broker._authenticator, configured)
            told.append(f"http://{listener.address}")
            is_up.set()
            while not stopped.is_set():
                await asyncio.sleep(_TICK_S)
                clock.advance(_TICK_NS)
            await listener.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="served")
    thread.start()
    assert is_up.wait(30)
    try:
        yield Served(told[0], token)
    finally:
        stop[0].call_soon_threadsafe(stop[1])
        thread.join(30)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with (
        tempfile.TemporaryDirectory(prefix="runnel-test-") as directory,
        serving(Path(directory)) as up,
    ):
        yield up


@but_for_streams.parametrize()
@_EXAMPLES
def test_every_answer_is_as_documented(case: Case, served: Served) -> None:
    case.call_and_validate(base_url=served.url, headers=served.headers, checks=_CHECKS)


def test_streams_are_the_only_resource_that_is_asked_otherwise() -> None:
    found = [each.ok() for each in but_for_streams.get_all_operations() if isinstance(each, Ok)]
    asked = {operation.definition.raw["operationId"] for operation in found}
    assert asked == {operation["operationId"] for _, _, operation in operations()} - {"stream"}


@given(case=schema["/v1/stream"]["GET"].as_strategy())
@_EXAMPLES
def test_streams_begin_or_are_refused_as_documented(case: Case, served: Served) -> None:
    request = case.as_transport_kwargs(base_url=served.url, headers=served.headers)
    with requests.request(**request, stream=True, timeout=30) as answer:
        if answer.status_code == 200:
            assert answer.headers["content-type"] == "text/event-stream"
            assert next(answer.iter_lines()).startswith(b"retry: ")
        else:
            case.validate_response(answer, checks=_CHECKS)


@pytest.mark.parametrize(("path", "method", "operation"), list(operations()), ids=_named)
def test_without_a_token_nothing_is_answered_but_health(
    path: str, method: str, operation: dict[str, Any], served: Served
) -> None:
    answer = requests.request(method, served.url + re.sub(r"{\w+}", "1", path), timeout=30)
    if operation["operationId"] in OPEN_TO_ALL:
        assert answer.status_code == 200
        return
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "unauthenticated"
