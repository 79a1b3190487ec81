"""The architecture's rules: what may import what, and that they are really watched."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINT_IMPORTS = Path(sys.executable).parent / "lint-imports"

OPTIONAL_PACKAGES = (
    "pyarrow",
    "pandas",
    "pyspark",
    "deltalake",
    "grpc",
    "litestar",
    "asyncpg",
    "obstore",
)

# What each file may not import, though it stands in the right place otherwise.
VIOLATIONS = {
    "runnel/topics/upward.py": "import runnel.log",
    "runnel/formats/impure_clock.py": "import time",
    "runnel/formats/impure_file.py": "def read():\n    from pathlib import Path",
    "runnel/topics/impure_platform.py": "import runnel.platform",
    "runnel/log/columnar.py": "import pyarrow.parquet",
    "runnel/group_rules/impure.py": "import asyncio",
    "runnel/broker/backwards.py": "import runnel.client",
    "runnel/client/sideways.py": "import runnel.log",
    "runnel/client/worldly.py": "import runnel.platform",
    "runnel/spark/writing.py": "import runnel.log.segments_made_up",
    "runnel/protocols/http/neighbour.py": "import runnel.protocols.native",
    "runnel/protocols/native/shortcut.py": "import runnel.log",
    "runnel/broker/behind_a_face.py": "import runnel.log.memory.shard",
    "runnel/broker/knows_a_store.py": "from runnel.log.memory import MemoryLog",
    "runnel/misc/__init__.py": "",
}
PERMITTED = {
    "runnel/spark/offline.py": "import runnel.log.reading",
    "runnel/cli/both_towers.py": "import runnel.client, runnel.log, pyarrow",
    "runnel/embedded.py": "import runnel.client, runnel.broker",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package and its rules, with the parts that are still to come."""
    shutil.copytree(ROOT / "src" / "runnel", tmp_path / "runnel")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    write(tmp_path, "tools/faces.py", (ROOT / "tools" / "faces.py").read_text())
    for part in ("broker", "client", "protocols/http", "protocols/native", "spark", "group_rules"):
        write(tmp_path, f"runnel/{part}/__init__.py", "")
    write(tmp_path, "runnel/protocols/__init__.py", "")
    if not any(tmp_path.glob("runnel/log/reading*")):
        write(tmp_path, "runnel/log/reading.py", "")
    return tmp_path


def write(tree: Path, name: str, text: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text(text + "\n")


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_two_towers_may_meet_where_the_architecture_says_so(tree: Path) -> None:
    for name, text in PERMITTED.items():
        write(tree, name, text)
    answer = lint(tree)
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_kind_of_forbidden_import_is_caught(tree: Path) -> None:
    write(tree, "runnel/log/segments_made_up.py", "")
    for name, text in VIOLATIONS.items():
        write(tree, name, text)
    answer = lint(tree)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in VIOLATIONS
    ]
    missed = [module for module in modules if module not in answer.stdout]
    assert not missed, answer.stdout


def test_nothing_asks_which_kind_of_store_it_has() -> None:
    """Stores differ in their capabilities. Nothing outside the log asks for a class of the log."""
    asking = []
    for path in sorted((ROOT / "src" / "runnel").rglob("*.py")):
        name = path.relative_to(ROOT / "src" / "runnel").as_posix()
        tree = ast.parse(path.read_text())
        if name.startswith("log/"):
            continue
        of_the_log = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("runnel.log")
            for alias in node.names
        }
        asking += [
            f"{name}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
            and of_the_log
            & {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
        ]
    assert asking == []


def test_every_module_but_the_optional_ones_imports_without_optional_packages() -> None:
    program = f"""
import importlib, pkgutil, sys
for name in {OPTIONAL_PACKAGES!r}:
    sys.modules[name] = None
import runnel
skipped = ("runnel.formats.arrow", "runnel.spark", "runnel.protocols.http", "runnel.protocols.grpc")
for module in pkgutil.walk_packages(runnel.__path__, "runnel."):
    if not module.name.startswith(skipped) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
