"""The generated pages of docs/reference are in step with the code, and leave nothing of it out."""

from __future__ import annotations

import re
from typing import Final

import pytest

import runnel
import runnel.client
import runnel.testing
from runnel.cli.main import COMMANDS
from tools.reference.pages import PAGES, ROOT
from tools.reference.python_api import PARTS, public_members

REFRESH: Final = "write it anew: .venv/bin/python -m tools.reference"
# Of names at the top: errors have a table of their own, settings a page; this one is for the library itself.
_ELSEWHERE: Final = frozenset(("Settings", "open_bus"))


@pytest.mark.parametrize("path", PAGES)
def test_page_is_in_step_with_the_code(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path](), f"{path}: {REFRESH}"


def test_every_command_is_on_its_page_and_every_option_has_words() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"\n## runnel {name}" in page
    rows = re.findall(r"^\| (`-.*?`) \| (.*?) \|", page, re.MULTILINE)
    assert rows
    assert [option for option, words in rows if not words.strip()] == []


def test_everything_that_is_exported_is_on_the_page_of_the_python_api() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    for module in (runnel, runnel.client, runnel.testing):
        for name in module.__all__:
            assert name in _ELSEWHERE or re.search(rf"\b{name}\b", page), name


def test_everything_on_the_page_of_the_python_api_has_words() -> None:
    silent = []
    for part in PARTS:
        for shown in part.shown:
            if not shown.thing.__doc__:
                silent.append(shown.name)
            if not isinstance(shown.thing, type):
                continue
            twins = dict(public_members(shown.twin)) if shown.twin else {}
            for name, member in public_members(shown.thing):
                is_shown = shown.members is None or name in shown.members
                if is_shown and callable(member) and not member.__doc__ and name not in twins:
                    silent.append(f"{shown.name}.{name}")
    assert silent == []
