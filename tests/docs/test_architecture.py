"""ARCHITECTURE.md names files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "runnel"
PAGE = ROOT / "ARCHITECTURE.md"
_NAMED = re.compile(r"`([\w/]+(?:\.py|/))`")


def test_every_file_and_folder_it_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    folders = [path for path in PACKAGE.rglob("*") if path.is_dir()]
    missing = [
        name
        for name in _NAMED.findall(text)
        if not any((base / name).exists() for base in (ROOT, PACKAGE, *folders))
    ]
    assert not missing, f"{PAGE.name} names what is not there: {missing}"


def test_every_folder_of_the_package_is_described() -> None:
    text = PAGE.read_text(encoding="utf-8")
    folders = [
        path for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()
    ]
    missing = [path.name for path in folders if f"`{path.name}/`" not in text]
    assert not missing, f"{PAGE.name} does not describe: {missing}"
