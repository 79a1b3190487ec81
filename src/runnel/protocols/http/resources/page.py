"""The documentation that the listener serves: the OpenAPI document, a page to read and try it, and an index.

The page loads everything from the broker, so it works without access to the internet.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Final

from litestar import Request, get
from litestar.types import ControllerRouterHandler

from runnel.protocols.http.resources.openapi import openapi_document
from runnel.protocols.http.server.answers import Answer, encode_json
from runnel.protocols.http.server.calls import call_of

_PAGE: Final = files("runnel.protocols.http.resources").joinpath("docs.html").read_bytes()
_HTML: Final = "text/html; charset=utf-8"
# Needs no token: the index lists what every broker has, and says nothing about this one.
_INDEX_LINKS: Final = {
    "docs": ("/docs", "every resource, to read about and to try"),
    "openapi": ("/openapi.json", "the same for programs (OpenAPI)"),
    "topics": ("/v1/topics", "topics"),
    "subscriptions": ("/v1/subscriptions", "subscriptions"),
    "statistics": ("/v1/statistics", "figures of the broker"),
    "metrics": ("/metrics", "the same for Prometheus"),
    "health": ("/healthz", "whether the process lives"),
    "readiness": ("/readyz", "whether it can store what it is given"),
}


def page_handlers(documented: Sequence[ControllerRouterHandler]) -> list[ControllerRouterHandler]:
    """Handlers of the OpenAPI document of these resources, of the page and of the index."""
    making = threading.Lock()

    @cache
    def document() -> Answer:
        return Answer(openapi_document(documented))

    policy = (
        "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"style-src 'unsafe-inline'; script-src '{_script_hash()}'"
    )
    page = Answer(
        _PAGE,
        content_type=_HTML,
        headers=(("content-security-policy", policy), ("referrer-policy", "no-referrer")),
    )

    # Built on the first request: it takes as long as the rest of the start (docs/performance.md).
    @get("/openapi.json", include_in_schema=False, sync_to_thread=True)
    def openapi() -> Answer:
        with making:
            return document()

    @get("/docs", include_in_schema=False, sync_to_thread=False)
    def docs() -> Answer:
        return page

    index_page, index = _index_answers()

    @get("/", include_in_schema=False, sync_to_thread=False)
    def root(request: Request[Any, Any, Any]) -> Answer:
        wants_html = b"text/html" in call_of(request).headers.get(b"accept", b"").lower()
        return index_page if wants_html else index

    return [openapi, docs, root]


def _index_answers() -> tuple[Answer, Answer]:
    """The answers of `/` to browsers and to programs."""
    rows = "".join(
        f'<li><a href="{path}"><code>{path}</code></a> {text}</li>\n'
        for path, text in _INDEX_LINKS.values()
    )
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Runnel</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        "<style>body{font:16px/1.6 system-ui,sans-serif;max-width:40em;margin:3em auto;padding:0 1em}</style></head>\n"
        "<body><h1>Runnel</h1>\n<p>This is the HTTP listener of a Runnel message broker.</p>\n"
        f"<ul>\n{rows}</ul>\n"
        "<p>If the broker asks for tokens, all but the documentation and the health need one: "
        "<code>Authorization: Bearer runnel_…</code></p>\n</body></html>\n"
    )
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = (
        ("content-security-policy", policy),
        ("referrer-policy", "no-referrer"),
        ("vary", "accept"),
    )
    links = {name: path for name, (path, _) in _INDEX_LINKS.items()}
    return (
        Answer(page.encode(), content_type=_HTML, headers=headers),
        Answer(encode_json({"name": "runnel", "links": links}), headers=(("vary", "accept"),)),
    )


def _script_hash() -> str:
    found = re.search(rb"<script>(.*?)</script>", _PAGE, re.DOTALL)
    assert found is not None
    return f"sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}"
