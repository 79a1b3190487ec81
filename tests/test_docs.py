"""The pages keep their word: what they show runs, the tests that they name exist, and so do the pages they point to.

A block that cannot be run says so in the line above it: `<!-- not run: why -->`.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from runnel.cli.main import run
from runnel.config import load
from tests.cli.conftest import serving

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
)
PYTHON_PAGES = ("README.md", "docs/python.md")
SHELL_PAGES = ("README.md", "docs/cli.md", "docs/http.md")
DOCUMENTED_URL = "runnel://127.0.0.1:7470"
DOCUMENTED_HTTP = "http://127.0.0.1:7480"

_BLOCK = re.compile(r"^(<!-- not run: [^\n]+ -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")
_SHELL_WORDS = frozenset("|<>;&")
_TEST_NAME = re.compile(r"\btest_\w+\b")


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


def blocks(page: str, *languages: str) -> list[Block]:
    """Those of a page that are to be run, from top to bottom."""
    text = (ROOT / page).read_text()
    return [
        Block(page, text[: found.start(3)].count("\n") + 1, found[2], found[3])
        for found in _BLOCK.finditer(text)
        if found[1] is None and found[2] in languages
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader of a page stands; his broker stores in ./runnel-data."""
    return tmp_path_factory.mktemp("reader")


@pytest.fixture(scope="module")
def doors(directory: Path) -> Iterator[tuple[str, str]]:
    """The native and the HTTP door of a broker."""
    with serving(directory / "runnel-data", "--http", "127.0.0.1:0") as (_, urls):
        native, http = urls.split()
        yield native, http


@pytest.fixture(scope="module")
def broker_url(doors: tuple[str, str]) -> str:
    return doors[0]


def run_blocks(
    found: list[Block], url: str, directory: Path | None = None, http: str = DOCUMENTED_HTTP
) -> None:
    """Python and commands, one after the other, with the names that the Python before made."""
    assert found
    names: dict[str, Any] = {"__name__": found[0].page}
    for block in found:
        text = block.text.replace(DOCUMENTED_URL, url).replace(DOCUMENTED_HTTP, http)
        if directory is not None:
            # Java has another working directory than this process: what it is told needs a whole path.
            text = re.sub(r"\b(?=checkpoints/|tables/|runnel-data\")", f"{directory}/", text)
        if block.language == "python":
            _run_python(text, block, names)
        else:
            for line in text.splitlines():
                _run_command(line)


def _run_python(text: str, block: Block, names: dict[str, Any]) -> None:
    # As in a notebook, `await` may stand alone. The line of an error is that of the page.
    placed = "\n" * (block.line - 1) + text
    code = compile(placed, str(ROOT / block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    ended = eval(code, names)  # it is our own page
    if inspect.iscoroutine(ended):
        asyncio.run(ended)


def _run_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "runnel" and not _SHELL_WORDS.intersection(words):
        assert run(words[1:]) == 0, line  # within this process: many times as quick
    else:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        bash = ["bash", "-e", "-o", "pipefail", "-c", line]
        subprocess.run(bash, check=True, timeout=60, env=os.environ | {"PATH": path})


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_of_a_page_runs_from_top_to_bottom(page: str, broker_url: str) -> None:
    run_blocks(blocks(page, "python"), broker_url)


@pytest.mark.parametrize("page", SHELL_PAGES)
def test_commands_of_a_page_succeed_one_after_the_other(
    page: str, doors: tuple[str, str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    native, http = doors
    monkeypatch.setenv("RUNNEL_URL", native)
    run_blocks(blocks(page, "sh"), native, http=http)


def test_settings_of_the_pages_are_accepted(tmp_path: Path) -> None:
    found = [block for page in PYTHON_PAGES for block in blocks(page, "toml")]
    assert found
    for block in found:
        path = tmp_path / "runnel.toml"
        path.write_text(block.text)
        assert load(config_path=str(path), environment={}).settings.topics


def test_promises_name_tests_that_exist() -> None:
    known = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("test_*.py"):
        known |= set(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    named = set(_TEST_NAME.findall((ROOT / "docs/promises.md").read_text()))
    assert named
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in _LINK.findall(text):
        found = page.parent / target
        assert found.exists(), f"{page.name} points to {target}"
        if anchor and found.suffix == ".md":
            assert anchor[1:] in _anchors(found), f"{page.name} points to {target}{anchor}"


def _anchors(page: Path) -> set[str]:
    """Of its headings, as they are made by those who render it."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
