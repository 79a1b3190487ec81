"""The OpenAPI document is complete, and the page needs no other site."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from runnel.protocols.http.app import HANDLERS
from runnel.protocols.http.resources.openapi import openapi_document
from tests.protocols.http.scene import in_loop, open_scene

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(openapi_document(HANDLERS))
    return found


def _operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_operations_have_names_of_their_own_and_a_place_on_the_page(
    document: dict[str, Any],
) -> None:
    operations = _operations(document)
    names = [operation["operationId"] for _, _, operation in operations]
    assert len(set(names)) == len(names)
    known = {tag["name"] for tag in document["tags"]}
    for _, _, operation in operations:
        assert set(operation["tags"]) <= known


def test_every_operation_says_what_it_does_in_a_sentence_and_in_full(
    document: dict[str, Any],
) -> None:
    for path, method, operation in _operations(document):
        summary, description = operation["summary"], operation["description"]
        # A sentence, and no name of a function.
        assert re.fullmatch(r"[A-Z][a-z]+ .*[^.\s]", summary), (path, method, summary)
        assert len(summary) <= 120, (path, method, summary)
        assert description.startswith(f"{summary}."), (path, method)
    read = document["paths"]["/v1/topics/{topic}/messages"]["get"]
    assert read["summary"] == "Read messages again, as often as you like"


def test_there_are_no_examples_but_our_own(document: dict[str, Any]) -> None:
    """Litestar would make some up of random letters, for what it finds in declared answers."""
    for name, schema in document["components"]["schemas"].items():
        assert "example" not in json.dumps(schema), name
    for path, method, operation in _operations(document):
        if operation["operationId"] != "publish":
            assert "example" not in json.dumps(operation), (path, method)


def test_every_parameter_is_described(document: dict[str, Any]) -> None:
    for path, method, operation in _operations(document):
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), (path, method, parameter["name"])
            assert "null" not in json.dumps(parameter["schema"])


def test_every_resource_that_needs_a_token_says_how_it_is_refused(document: dict[str, Any]) -> None:
    for path, _, operation in _operations(document):
        if path in ("/healthz", "/readyz"):
            assert operation["security"] == []
            continue
        assert {"token": []} in operation["security"]
        for status in ("400", "401", "403", "429", "503"):
            assert PROBLEM in operation["responses"][status]["content"]


def test_every_answer_has_a_shape(document: dict[str, Any]) -> None:
    for path, method, operation in _operations(document):
        good = {status: each for status, each in operation["responses"].items() if status < "300"}
        assert good, (path, method)
        for status, answer in good.items():
            if status != "204":
                assert answer["content"], (path, method, status)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert name in schemas


def test_publishing_takes_every_kind_of_body(document: dict[str, Any]) -> None:
    publish = document["paths"]["/v1/topics/{topic}/messages"]["post"]
    assert set(publish["requestBody"]["content"]) == {
        "application/json",
        "application/x-ndjson",
        "application/octet-stream",
    }
    assert {"200", "202", "413", "507"} <= set(publish["responses"])


@in_loop
async def test_the_document_and_the_page_are_served() -> None:
    async with open_scene() as scene:
        served = await scene.http.get("/openapi.json")
        assert served.json()["info"]["title"] == "Runnel"
        page = await scene.http.get("/docs")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "script-src 'sha256-" in page.headers["content-security-policy"]
        # It refers to no other site.
        assert not re.search(r"https?://|\bsrc=", page.text)
