"""The request that handlers get: it decodes names and bodies, and refuses unknown query parameters."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_plus

import msgspec
import msgspec.inspect
from litestar import Request
from litestar.exceptions import ValidationException
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from litestar.types import Scope

from runnel.protocols.http.encoding.messages import decoded
from runnel.protocols.http.encoding.problems import FieldFault, NotTakenError
from runnel.protocols.http.server.bodies import JSON, content_type, read_control_body
from runnel.protocols.http.server.calls import call_of
from runnel.protocols.http.server.paths import decoded_name

_CHECKED: Final = "runnel.checked"
_SHORT_BYTES_MAX: Final = 256  # longer queries are not cached


class HttpRequest(Request[Any, Any, Any]):
    """Litestar's request, which also decodes names in paths, refuses unknown query parameters and decodes `data` once.

    This is not done in a middleware, because a middleware costs every request a tenth of its time.
    """

    _read: bytes | None = None

    def __init__(self, scope: Scope, *ends: Any, **named_ends: Any) -> None:
        super().__init__(scope, *ends, **named_ends)
        # Check once: to answer a refused request, Litestar makes this object again.
        if scope["query_string"] and "route_handler" in scope and _CHECKED not in scope:
            scope[_CHECKED] = True  # type: ignore[typeddict-unknown-key]
            handler = scope["route_handler"]
            query = scope["query_string"]
            if isinstance(handler, HTTPRouteHandler):
                check = _check_query_cached if len(query) <= _SHORT_BYTES_MAX else _check_query
                check(handler, query)

    @property
    def path_params(self) -> dict[str, Any]:
        return {
            field: decoded_name(field, value) if isinstance(value, str) else value
            for field, value in self.scope["path_params"].items()
        }

    async def body(self) -> bytes:
        if self._read is None:
            self._read = await read_control_body(call_of(self), self)
        return self._read

    async def json(self) -> Any:
        call = call_of(self)
        kind = content_type(call)
        if kind not in (JSON, ""):
            raise NotTakenError(f"content-type {kind[:64]!r}: this resource takes {JSON}")
        wanted = self.route_handler.parsed_data_field
        assert wanted is not None
        shape = _shape(wanted.annotation)
        return decoded(shape.decoder, await self.body(), fields=shape.fields, choices=shape.choices)


class _Shape(NamedTuple):
    """How a body is decoded, and the names and words that its error messages mention."""

    decoder: msgspec.json.Decoder[Any]
    fields: Sequence[str]  # of the struct and of the structs within it
    choices: Mapping[str, str]  # by field: the words that it may be


@lru_cache(maxsize=256)
def _shape(wanted: Any) -> _Shape:
    fields: dict[str, None] = {}
    choices: dict[str, str] = {}
    waiting: list[Any] = [msgspec.inspect.type_info(wanted)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, msgspec.inspect.StructType):
            for field in each.fields:
                if field.encode_name not in fields:
                    fields[field.encode_name] = None
                    waiting.append(field.type)
                    if words := _words(field.type):
                        choices[field.encode_name] = words
        waiting += [
            inner
            for name in ("item_type", "value_type", "type")
            if (inner := getattr(each, name, None)) is not None
        ]
        waiting += getattr(each, "types", ())
    return _Shape(msgspec.json.Decoder(wanted), tuple(fields), choices)


def _words(kind: Any) -> str:
    """The words that a field may be; empty if it takes other values."""
    for each in getattr(kind, "types", (kind,)):
        if isinstance(each, msgspec.inspect.EnumType):
            return ", ".join(str(member.value) for member in each.cls)
        if isinstance(each, msgspec.inspect.LiteralType):
            return ", ".join(map(str, each.values))
    return ""


def explained(request: Request[Any, Any, Any], error: ValidationException) -> ValidationException:
    """The error with the parameter's name as clients write it, and with the words that it may be."""
    handler = request.scope.get("route_handler")
    faults = error.extra
    if not isinstance(handler, HTTPRouteHandler) or not isinstance(faults, list) or not faults:
        return error
    fault: dict[str, str] = faults[0]
    field = handler.parsed_fn_signature.parameters.get(fault.get("key", ""))
    if field is None:
        return error
    if isinstance(field.kwarg_definition, QueryParameter) and field.kwarg_definition.name:
        fault["key"] = field.kwarg_definition.name
    for kind in (field, *field.inner_types):
        if isinstance(kind.annotation, type) and issubclass(kind.annotation, enum.StrEnum):
            fault["message"] += f"; it is one of {', '.join(kind.annotation)}"
    return error


class _ParameterKind(NamedTuple):
    """Which values a query parameter takes."""

    is_text: bool
    is_list: bool


def _check_query(handler: HTTPRouteHandler, query: bytes) -> None:
    """Refuse unknown parameters: Litestar would ignore a misspelt one, and the answer would be a wrong one."""
    known = _parameters(handler)
    seen: set[str] = set()
    for part in query.split(b"&"):
        given, _, value = part.partition(b"=")
        name = unquote_plus(given.decode("latin-1"))
        if not name:
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known) or 'none'}"
            )
            raise FieldFault(name[:64], f"is not a parameter of this resource; {hint}")
        # Litestar would take the first of several values, and would take the word null for an absent value.
        if name in seen and not known[name].is_list:
            raise FieldFault(name, "is given twice")
        if value.lower() == b"null" and not known[name].is_text:
            raise FieldFault(name, "null is no value of it; leave it out instead")
        seen.add(name)


# Clients that poll send the same query again and again.
_check_query_cached: Final = lru_cache(maxsize=1024)(_check_query)


@lru_cache(maxsize=256)
def _parameters(handler: HTTPRouteHandler) -> dict[str, _ParameterKind]:
    """The query parameters of a resource."""
    return {
        field.kwarg_definition.name or name: _ParameterKind(
            str in {field.annotation, *field.args}, field.is_non_string_sequence
        )
        for name, field in handler.parsed_fn_signature.parameters.items()
        if isinstance(field.kwarg_definition, QueryParameter)
    }
