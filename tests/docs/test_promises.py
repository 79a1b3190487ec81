"""Promises are held: docs/promises.md names a test for each, and those exist."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

_TEST_NAME = re.compile(r"\btest_\w+\b")
_ROW = re.compile(r"^\|(.+)\|([^|]*)\|$", re.MULTILINE)


def page() -> str:
    return (ROOT / "docs/promises.md").read_text(encoding="utf-8")


def test_tests_that_are_named_exist() -> None:
    paths = list((ROOT / "tests").rglob("test_*.py"))
    known = {path.stem for path in paths}
    for path in paths:
        known |= set(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    named = set(_TEST_NAME.findall(page()))
    assert named
    assert named - known == set()


def test_folders_and_programs_that_are_named_exist() -> None:
    for path in re.findall(r"`((?:tests|bin)/[\w./-]+)`", page()):
        assert (ROOT / path).exists(), path


def test_every_limit_among_the_settings_is_promised() -> None:
    settings = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    limits = re.findall(r"^\| `([\w.]+_(?:max|timeout))` \|", settings, re.MULTILINE)
    assert limits
    # Several of a section stand together: the first with it, the others without.
    told = set(re.findall(r"`(?:\w+\.)?(\w+_(?:max|timeout))`", page()))
    assert [limit for limit in limits if limit.partition(".")[2] not in told] == []


def test_every_promise_names_what_holds_it() -> None:
    rows = [
        found
        for found in _ROW.finditer(page())
        if not set(found[2].strip()) <= {"-"} or found[2].strip() == ""
    ]
    held = [(found[1].strip(), found[2].strip()) for found in rows if found[2].strip() != "tests"]
    assert held
    assert [promise for promise, by in held if "`" not in by] == []
