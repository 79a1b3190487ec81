"""The pages that use Spark do what they say, as those of tests/docs; the sessions that they make are this folder's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, needs
from tests.docs.reader import reading


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("page", [page for page in PAGES if needs(page, "spark")])
def test_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    with reading(page, tmp_path) as reader:
        reader.read()
