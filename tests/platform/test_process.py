"""How many cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runnel.platform import process


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000\n", 8), ("400000 100000\n", 4), ("150000 100000\n", 1), ("50000 100000\n", 1)],
)
def test_quota_of_a_container_bounds_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(quota)
    monkeypatch.setattr(process, "_CPU_QUOTA", str(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert process.available_cores() == cores


def test_without_a_quota_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_CPU_QUOTA", str(tmp_path / "none"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert process.available_cores() == 2
