"""docs/reference/http.md: every resource of the HTTP listener, from its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from runnel.protocols.http.app import HANDLERS
from runnel.protocols.http.resources.openapi import openapi_document
from tools.reference.markdown import anchor, code, head, page, prose, table

Json = dict[str, Any]

_PROBLEM: Final = "application/problem+json"
_EVERYWHERE: Final = frozenset(("400", "401", "403", "429", "503"))
_REFERENCE: Final = "#/components/schemas/"


def rest_page() -> str:
    document: Json = json.loads(openapi_document(HANDLERS))
    operations = list(_operations(document))
    lines = head(
        "REST",
        "Every resource of the HTTP listener with its parameters, bodies and answers. [http.md](../http.md) explains "
        "them with examples that are run; a broker serves the same as `/openapi.json`, and at `/docs` as a page to "
        "try them on.",
        "Errors are problem details (RFC 9457, `application/problem+json`) with a stable `code`: [their "
        "table](../http.md#errors). What a token needs for each resource is in [security.md](../security.md#rights).",
        "Every resource may answer 400 (the request is wrong as it stands), 401 (a token is needed, or the one shown "
        "is not known), 403 (the token has no right to this), 429 (beyond a limit) and 503 (not now); those are not "
        "repeated below.",
    )
    lines += table(
        ("resource", "what it does"),
        [(f"[`{name}`](#{anchor(name)})", what["summary"]) for name, what in operations],
    )
    for name, what in operations:
        lines += _section(name, what)
    lines += ["## Bodies", "", *prose("By name, as the tables above have them.")]
    schemas: Mapping[str, Json] = document["components"]["schemas"]
    for name in sorted(schemas):
        lines += _schema(name, schemas[name])
    return page(lines)


def _operations(document: Json) -> Iterator[tuple[str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def _section(name: str, what: Json) -> list[str]:
    lines = [f"## {name}", "", *prose(what.get("description") or what["summary"])]
    lines += table(
        ("parameter", "in", "type", "meaning"),
        [
            (
                code(each["name"]),
                each["in"],
                _kind(each.get("schema", {}), required=each.get("required", False)),
                each.get("description", ""),
            )
            for each in what.get("parameters", ())
        ],
    )
    lines += table(
        ("body", "form"),
        [
            (code(content), _kind(form.get("schema", {}), required=True))
            for content, form in what.get("requestBody", {}).get("content", {}).items()
        ],
    )
    lines += table(("status", "answer"), list(_answers(what["responses"])))
    return lines


def _answers(responses: Json) -> Iterator[tuple[str, str]]:
    for status, answer in sorted(responses.items()):
        contents = answer.get("content") or {}
        if status in _EVERYWHERE and _PROBLEM in contents:
            continue
        forms = [
            f"{_kind(form.get('schema', {}), required=True)} as {code(content)}"
            for content, form in contents.items()
            if content != _PROBLEM
        ]
        words = answer.get("description", "")
        is_usual = words in ("Request fulfilled, document follows", "Document created, URL follows")
        yield status, "; ".join((*forms, *(() if is_usual and forms else (words,))))


def _schema(name: str, schema: Json) -> list[str]:
    lines = [f"### {name}", "", *prose(schema.get("description", ""))]
    if values := schema.get("enum"):
        return [*lines, *prose("One of " + ", ".join(code(str(value)) for value in values) + ".")]
    required = schema.get("required", ())
    rows = [
        (
            code(field),
            _kind(form, required=field in required),
            form.get("description", ""),
        )
        for field, form in schema.get("properties", {}).items()
    ]
    return [*lines, *table(("field", "type", "meaning"), rows)]


def _kind(schema: Json, *, required: bool) -> str:
    """A type in words: `integer, 1 to 10000, default 1000`."""
    words = [_plain_kind(schema)]
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is not None and high < 2**31:
        words.append(f"{low or 0:g} to {high:g}" if high < 10**6 else f"up to {int(high)}")
    default = schema.get("default")
    if default is not None:
        words.append(f"default {code(json.dumps(default))}")
    elif not required:
        words.append("optional")
    return ", ".join(words)


def _plain_kind(schema: Json) -> str:
    if reference := schema.get("$ref"):
        name = reference.removeprefix(_REFERENCE)
        return f"[{name}](#{anchor(name)})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        kinds = [_plain_kind(each) for each in options if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        return f"list of {_plain_kind(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"names to {_plain_kind(schema['additionalProperties'])}"
    if values := schema.get("enum"):
        return " or ".join(code(str(value)) for value in values)
    kind = schema.get("type", "anything")
    return (
        str(kind) if isinstance(kind, str) else " or ".join(each for each in kind if each != "null")
    )
