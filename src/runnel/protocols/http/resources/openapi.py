"""Builds the OpenAPI document: Litestar's, completed by what Litestar cannot see in the handlers.

That is: a publisher's bodies and headers, the problems that every resource may answer with, and which need a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec
from litestar import Litestar
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.spec import Tag
from litestar.routes import HTTPRoute
from litestar.types import ControllerRouterHandler

from runnel.protocols.http.encoding.messages import MessageIn
from runnel.protocols.http.encoding.problems import PROBLEM_TYPE, Problem
from runnel.protocols.http.resources.bulk import BulkReceipt
from runnel.protocols.http.resources.publish import Receipt, Receipts
from runnel.topics.names import NAME_BYTES_MAX

_Json = dict[str, Any]

_DESCRIPTION: Final = """\
REST for clients in any language: publish, replay, read live, share work, administer.

Topic names in paths may be percent-encoded (`sensors%2Fa`) or not (`sensors/a`). Errors are problem details
(RFC 9457): `code` is stable and for programs, `detail` says what would be right, `retriable` whether the same request
may succeed later.
"""
_TAGS: Final = (
    Tag("publish", "Publish messages."),
    Tag("read", "Replay: stored messages from any offset or time on."),
    Tag("live", "Streams: messages as they arrive."),
    Tag("work", "Acknowledged work: each message to one consumer, until it is acknowledged."),
    Tag("topics", "Topics and how they are kept."),
    Tag("cursors", "Positions that outlive their readers."),
    Tag("monitoring", "Metrics, connections and statistics."),
    Tag("health", "Probes for a supervisor: whether the broker lives, and whether it is ready."),
)
# Problems of every resource that needs a token, in addition to its own.
_EVERYWHERE: Final = {
    "400": "The request is wrong: repeating it unchanged cannot succeed.",
    "401": "The request has no token, or an unknown one.",
    "403": "The token has no right to this, or the request came from a web page of another site.",
    "429": "A limit is reached: of a token's requests, of streams, or of objects.",
    "503": "Temporarily unavailable: the same request may succeed later.",
}
_WITH_TOPIC: Final = {"404": "There is no such topic, partition, subscription or cursor."}
_WITH_BODY: Final = {
    "413": "The body, or a message in it, is too large.",
    "415": "This resource does not accept the content type or the encoding.",
}
_STORING: Final = {"507": "The disk is full."}
_OFFSETS: Final = {
    "410": "The messages from that offset on are gone.",
    "416": "The offset has not been reached.",
}
_STATES: Final = {
    "409": "The request conflicts with the state: it differs, or the request came too late."
}
_NAME_PATTERN: Final = r"^[^\u0000-\u001f\u007f-\u009f\u2028\u2029]+$"
_OPEN: Final = frozenset(("health", "readiness", "openapi", "docs"))


def openapi_document(handlers: Sequence[ControllerRouterHandler]) -> bytes:
    """The document as JSON."""
    app = Litestar(
        [*handlers],
        logging_config=None,
        openapi_config=OpenAPIConfig(
            title="Runnel",
            version=_version(),
            description=_DESCRIPTION,
            tags=list(_TAGS),
            use_handler_docstrings=True,
        ),
    )
    document: _Json = app.openapi_schema.to_schema()
    # Schemas by msgspec, which also validates the bodies: with their limits, defaults and descriptions.
    _, schemas = msgspec.json.schema_components(
        (Problem, MessageIn, Receipt, Receipts, BulkReceipt, *_structs(app)),
        ref_template="#/components/schemas/{name}",
    )
    schemas["MessageIn"] = _message_in(schemas["MessageIn"])
    document["components"]["schemas"] |= schemas
    document["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "`runnel token add NAME --allow RIGHT:PATTERN` makes one; not needed where "
            "security.authentication is none.",
        }
    }
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if isinstance(operation, dict):
                _complete(path, method, operation)
    _describe_publish(document["paths"]["/v1/topics/{topic}/messages"]["post"])
    document["paths"]["/v1/stream"]["get"]["parameters"].append(
        {
            "name": "access_token",
            "in": "query",
            "required": False,
            "schema": {"type": "string"},
            "description": "A token, for browsers: their EventSource sends no headers. Elsewhere it belongs into one.",
        }
    )
    unready = document["paths"]["/readyz"]["get"]["responses"]
    unready["503"] = {**unready["200"], "description": "Not ready; `troubles` says why."}
    _describe_raw(document["paths"]["/v1/topics/{topic}/messages/{offset}"]["get"])
    return msgspec.json.encode(document)


def _structs(app: Litestar) -> Iterator[type[msgspec.Struct]]:
    """The structs that handlers take and return."""
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for handler in route.route_handlers:
                signature = handler.parsed_fn_signature
                kinds = [
                    each.annotation
                    for field in (signature.return_type, handler.parsed_data_field)
                    if field is not None
                    for each in (field, *field.inner_types)
                ]
                # A handler that encodes its answer itself declares the struct.
                kinds += [spec.data_container for spec in (handler.responses or {}).values()]
                for kind in kinds:
                    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                        yield kind


def _complete(path: str, method: str, operation: _Json) -> None:
    """Add a summary, the problems that the operation may answer with, and whether it needs a token."""
    operation["description"] = _unwrapped(operation["description"])
    operation["summary"] = _first_sentence(operation["description"])
    for parameter in operation.get("parameters", ()):
        _simplify(parameter)
    operation["responses"] = {
        status: response
        for status, response in operation.get("responses", {}).items()
        if PROBLEM_TYPE in response.get("content", {}) or not _is_litestars(response)
    }
    if operation.get("operationId") in _OPEN:
        operation["security"] = []
        return
    operation["security"] = [{"token": []}, {}]
    problems = dict(_EVERYWHERE)
    if "{" in path or "topic" in str(operation.get("parameters")):
        problems |= _WITH_TOPIC
    if method in ("post", "put"):
        problems |= _WITH_BODY | _STORING | _STATES
    if method == "delete":
        problems |= _STATES | _STORING
    if method == "get" and "message" in path:
        problems |= _OFFSETS
    for status, text in problems.items():
        operation["responses"].setdefault(status, _problem(text))


def _simplify(parameter: _Json) -> None:
    """Correct Litestar's schema: a parameter is never null, and a number is never below 0."""
    schema: _Json = parameter["schema"]
    choices = schema.pop("oneOf", None) or schema.pop("allOf", [])
    known = [choice for choice in choices if choice.get("type") != "null"]
    if len(known) == 1:
        schema |= known[0]
    elif known:
        schema["oneOf"] = known
    if schema.get("type") == "integer":
        schema.setdefault("minimum", 0)
    text = schema.pop("description", None)
    if text is not None:
        parameter["description"] = text
    if parameter["in"] == "path" and schema.get("type") == "string":
        schema |= {"minLength": 1, "maxLength": NAME_BYTES_MAX, "pattern": _NAME_PATTERN}
        parameter.setdefault("description", "A name, percent-encoded.")


def _unwrapped(docstring: str) -> str:
    """Each paragraph of a docstring in one line, without the line ends of the source."""
    return "\n\n".join(" ".join(each.split()) for each in docstring.split("\n\n"))


def _first_sentence(text: str) -> str:
    return re.split(r"\.(?:\s|$)", text, maxsplit=1)[0]


def _is_litestars(response: _Json) -> bool:
    """Whether it describes an error of Litestar's own, which this listener answers in another way."""
    return "Validation Exception" in response.get(
        "description", ""
    ) or "Bad request" in response.get("description", "")


def _problem(text: str) -> _Json:
    return {
        "description": text,
        "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


def _ref(name: str) -> _Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _message_in(schema: _Json) -> _Json:
    """Describe the fields, and that at most one of them is the payload."""
    fields: _Json = schema["properties"]
    fields["json"] = {"description": "The payload as JSON: stored as it is written here."}
    described = {
        "text": "The payload as text: stored as UTF-8.",
        "base64": "The payload as bytes.",
        "key": "Text; or key_base64, bytes. Messages of a key stay in order.",
        "partition_key": "What chooses the partition, if it is not the key. Text; or partition_key_base64, bytes.",
        "tags": "Names and values.",
        "event_time": "RFC 3339 with a zone, or nanoseconds since 1970; so with transmit_time.",
        "uid": "A KSUID, 20 bytes in base64.",
    }
    for name, text in described.items():
        fields[name]["description"] = text
    excluding = [("text", "json"), ("text", "base64"), ("json", "base64")]
    excluding += [(name, f"{name}_base64") for name in ("key", "partition_key")]
    schema["allOf"] = [{"not": _both_given(*pair)} for pair in excluding]
    return schema


def _both_given(*names: str) -> _Json:
    """null counts as not given, except for `json`, where it is a payload."""
    given = {name: {"type": "string"} for name in names if name != "json"}
    return {"required": list(names), "properties": given}


def _describe_publish(operation: _Json) -> None:
    message = _ref("MessageIn")
    operation["requestBody"] = {
        "required": False,
        "description": "One message or an array of them as JSON; lines of JSON without end, stored as they come; or "
        "anything else: the payload as it is, with everything else in headers.",
        "content": {
            "application/json": {
                "schema": {"oneOf": [message, {"type": "array", "items": message, "minItems": 1}]},
                "examples": {
                    "one": {"value": {"text": "21.5", "key": "a", "tags": {"unit": "C"}}},
                    "many": {"value": [{"json": {"celsius": 21.5}}, {"base64": "AAEC"}]},
                },
            },
            "application/x-ndjson": {
                "schema": {
                    **message,
                    "description": "Of each line. The body has no limit, a line has.",
                },
                "examples": {"lines": {"value": '{"text":"21.5"}\n{"text":"21.6"}\n'}},
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
    operation["parameters"] = [
        *operation.get("parameters", []),
        *(
            {
                "name": name,
                "in": "header",
                "required": False,
                "schema": {"type": "string"},
                "description": text,
            }
            for name, text in _PUBLISH_HEADERS
        ),
    ]
    receipts = [_ref("Receipt"), _ref("Receipts"), _ref("BulkReceipt")]
    answer = {"content": {"application/json": {"schema": {"anyOf": receipts}}}}
    operation["responses"]["200"] = {"description": "Published.", **answer}
    operation["responses"]["202"] = {"description": "Taken, at level none.", **answer}


_PUBLISH_HEADERS: Final = (
    ("Runnel-Key", "Of a payload as it is: its key, percent-encoded."),
    ("Runnel-Key-Base64", "Its key, if it is not text."),
    ("Runnel-Partition-Key", "Its partition key, percent-encoded."),
    ("Runnel-Partition-Key-Base64", "Its partition key, if it is not text."),
    ("Runnel-Tag", "A tag, `name=value`, percent-encoded; once for each."),
    ("Runnel-Event-Time", "RFC 3339 with a zone, or nanoseconds since 1970."),
    ("Runnel-Transmit-Time", "RFC 3339 with a zone, or nanoseconds since 1970."),
    ("Runnel-Uid", "A KSUID, 20 bytes in base64."),
    ("traceparent", "W3C trace context; becomes a tag of messages that have none."),
    ("tracestate", "W3C trace context; becomes a tag beside traceparent."),
)


def _describe_raw(operation: _Json) -> None:
    operation["responses"]["200"] = {
        "description": "The message.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        "headers": {
            name: {"schema": {"type": "string"}, "description": text}
            for name, text in (
                ("Runnel-Topic", "Percent-encoded."),
                ("Runnel-Partition", "A number."),
                ("Runnel-Offset", "A number."),
                ("Runnel-Receive-Time", "Nanoseconds since 1970."),
                *(header for header in _PUBLISH_HEADERS if header[0].startswith("Runnel-")),
            )
        },
    }


def _version() -> str:
    try:
        return version("runnel")
    except PackageNotFoundError:  # run from a tree that is not installed
        return "0"
