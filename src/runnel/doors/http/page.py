"""What the door says of itself: the OpenAPI document, and a page of our own that shows it and lets one try it.

The page asks nobody but the broker for anything, so that it works where nothing else can be reached.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Final

from litestar import get
from litestar.types import ControllerRouterHandler

from runnel.doors.http.answers import Answer
from runnel.doors.http.openapi import openapi_document

_PAGE: Final = files("runnel.doors.http").joinpath("docs.html").read_bytes()


def page_handlers(documented: Sequence[ControllerRouterHandler]) -> list[ControllerRouterHandler]:
    """The document of these resources, and the page. Both are made once, when the door is opened."""
    document = Answer(openapi_document(documented))
    policy = (
        "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"style-src 'unsafe-inline'; script-src '{_script_hash()}'"
    )
    page = Answer(
        _PAGE,
        content_type="text/html; charset=utf-8",
        headers=(("content-security-policy", policy), ("referrer-policy", "no-referrer")),
    )

    @get("/openapi.json", include_in_schema=False, sync_to_thread=False)
    def openapi() -> Answer:
        return document

    @get("/docs", include_in_schema=False, sync_to_thread=False)
    def docs() -> Answer:
        return page

    return [openapi, docs]


def _script_hash() -> str:
    found = re.search(rb"<script>(.*?)</script>", _PAGE, re.DOTALL)
    assert found is not None
    return f"sha256-{base64.b64encode(hashlib.sha256(found[1]).digest()).decode()}"
