"""Pages point to pages, headings and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

_LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in _LINK.findall(text):
        found = path.parent / target if target else path
        assert found.exists(), f"{page} points to {target}"
        if anchor and found.suffix == ".md":
            assert anchor[1:] in anchors(found), f"{page} points to {target}{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_every_page_is_found_from_the_readme(page: str) -> None:
    assert page in reachable(), f"no page that README.md leads to points to {page}"


def reachable() -> set[str]:
    """The pages that one gets to by following links."""
    found, open_pages = {"README.md"}, ["README.md"]
    while open_pages:
        path = ROOT / open_pages.pop()
        for target, _ in _LINK.findall(path.read_text(encoding="utf-8")):
            led_to = (path.parent / target).resolve()
            if led_to.is_dir():
                led_to /= "README.md"
            name = str(led_to.relative_to(ROOT)) if led_to.is_relative_to(ROOT) else ""
            if name in PAGES and name not in found:
                found.add(name)
                open_pages.append(name)
    return found


def anchors(page: Path) -> set[str]:
    """Of its headings, as they are made by those who render it."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
