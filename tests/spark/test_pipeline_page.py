"""The page of the pipelines keeps its word: its commands and its Python run, from top to bottom, as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import serving
from tests.test_docs import blocks, run_blocks

PAGE = "docs/pipeline.md"


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("spark")  # the sessions that the page makes are that one
def test_commands_and_python_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "runnel-data") as (_, url):
        monkeypatch.setenv("RUNNEL_URL", url)
        run_blocks(blocks(PAGE, "python", "sh"), url, tmp_path)
