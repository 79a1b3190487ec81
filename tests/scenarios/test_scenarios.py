"""Every scenario happens as its file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.play import FOLDER, play


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario_happens_as_written(path: Path) -> None:
    text = path.read_text()
    assert play(text) == text, f"to see what changed: python -m tests.scenarios.play {path.name}"
