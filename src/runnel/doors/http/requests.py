"""Requests as handlers get them: bodies decoded straight into what a handler wants, parameters that it knows."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Awaitable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_plus

import msgspec
import msgspec.inspect
from litestar import Request
from litestar.exceptions import ValidationException
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from litestar.routes import HTTPRoute
from litestar.types import ASGIApp, Receive, Scope, Send

from runnel.doors.http.answers import Answer
from runnel.doors.http.bodies import JSON, content_type, read_body
from runnel.doors.http.calls import call_of
from runnel.doors.http.messages import decoded
from runnel.doors.http.paths import decoded_name
from runnel.doors.http.problems import FieldFault, NotTakenError


class DoorRequest(Request[Any, Any, Any]):
    """Litestar's, but that `data` is decoded once, strictly, and faults name their place."""

    _read: bytes | None = None

    async def body(self) -> bytes:
        if self._read is None:
            self._read = await read_body(call_of(self), self)
        return self._read

    async def json(self) -> Any:
        call = call_of(self)
        kind = content_type(call)
        if kind not in (JSON, ""):
            raise NotTakenError(f"content-type {kind[:64]!r}: this resource takes {JSON}")
        wanted = self.route_handler.parsed_data_field
        assert wanted is not None
        decoder, fields = _decoder(wanted.annotation)
        return decoded(decoder, await self.body(), fields=fields)


_decoders: dict[Any, tuple[msgspec.json.Decoder[Any], tuple[str, ...]]] = {}


def _decoder(wanted: Any) -> tuple[msgspec.json.Decoder[Any], tuple[str, ...]]:
    found = _decoders.get(wanted)
    if found is None:
        found = _decoders[wanted] = (msgspec.json.Decoder(wanted), tuple(_fields(wanted)))
    return found


def _fields(wanted: Any) -> list[str]:
    """Names of the fields of a struct and of those within it: what an unknown one may have been meant to be."""
    info = msgspec.inspect.type_info(wanted)
    found: dict[str, None] = {}
    waiting: list[Any] = [info]
    while waiting:
        each = waiting.pop()
        if isinstance(each, msgspec.inspect.StructType):
            for field in each.fields:
                if field.encode_name not in found:
                    found[field.encode_name] = None
                    waiting.append(field.type)
        waiting += [
            inner
            for name in ("item_type", "value_type", "type")
            if (inner := getattr(each, name, None)) is not None
        ]
        waiting += getattr(each, "types", ())
    return list(found)


class CheckedParameters:
    """A Litestar middleware, behind its routing: names in the path are decoded, and queries may ask nothing unknown."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope.get("method") == "OPTIONS":
            return Answer(status=204, headers=(("allow", _methods(scope)),))(scope, receive, send)
        if scope["query_string"]:
            _check_query(scope)
        parameters: dict[str, Any] = scope["path_params"]
        if parameters:
            scope["path_params"] = {
                field: decoded_name(field, value) if isinstance(value, str) else value
                for field, value in parameters.items()
            }
        return self._app(scope, receive, send)


def _methods(scope: Scope) -> str:
    """Those of a resource. Litestar has a route for each of its handlers, and would tell the first one's."""
    found: set[str] = set()
    for route in scope["litestar_app"].routes:
        if isinstance(route, HTTPRoute) and scope["path_template"] in (
            route.path,
            route.path_format,
        ):
            found |= route.methods
    return ", ".join(sorted(found))


def explained(request: Request[Any, Any, Any], error: ValidationException) -> ValidationException:
    """What a choice has to offer, where something else was given."""
    handler = request.scope.get("route_handler")
    faults = error.extra
    if not isinstance(handler, HTTPRouteHandler) or not isinstance(faults, list) or not faults:
        return error
    name = faults[0].get("key")
    for each, field in handler.parsed_fn_signature.parameters.items():
        if name in (each, getattr(field.kwarg_definition, "name", None)):
            for kind in (field, *field.inner_types):
                if isinstance(kind.annotation, type) and issubclass(kind.annotation, enum.StrEnum):
                    faults[0]["message"] += f"; it is one of {', '.join(kind.annotation)}"
    return error


def _check_query(scope: Scope) -> None:
    """A misspelt parameter would be passed over, and the answer be another than was asked for."""
    handler = scope["route_handler"]
    if not isinstance(handler, HTTPRouteHandler):
        return
    known = _known(handler)
    for part in scope["query_string"].split(b"&"):
        name = unquote_plus(part.partition(b"=")[0].decode("latin-1"))
        if name and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known) or 'none'}"
            )
            raise FieldFault(name[:64], f"is not a parameter of this resource; {hint}")


@lru_cache(maxsize=256)
def _known(handler: HTTPRouteHandler) -> tuple[str, ...]:
    """The query parameters of a resource."""
    names = []
    for name, field in handler.parsed_fn_signature.parameters.items():
        if isinstance(field.kwarg_definition, QueryParameter):
            names.append(field.kwarg_definition.name or name)
    return tuple(names)
