"""Every page is read by somebody who does what it says. Those that need Spark: tests/spark/test_docs.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, needs
from tests.docs.reader import reading

HERE = [page for page in PAGES if not needs(page, "spark")]


@pytest.mark.timeout(300)  # real processes, one after the other, on a machine that may be busy
@pytest.mark.parametrize("page", HERE)
def test_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    if needs(page, "node") and (shutil.which("node") is None or shutil.which("npm") is None):
        pytest.skip("node and npm are not installed")
    with reading(page, tmp_path) as reader:
        reader.read()
