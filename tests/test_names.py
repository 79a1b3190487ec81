"""A class name stands for one thing: no two modules of the package define classes of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parent.parent / "src" / "runnel"

# Names that two modules may share, and why.
TWINS: Final[Mapping[str, str]] = {
    "Broker": "runnel.Broker, the public name of the embedded broker, runs the broker of broker/broker.py",
    "Receipt": "a published message as the Python client and as REST give it; both names are public",
}


def modules_of_each_class(package: Path) -> dict[str, list[str]]:
    """The modules that define a class of each name; generated modules (`*_pb2*.py`) do not count."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        if "_pb2" in path.name:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(str(path.relative_to(package)))
    return modules


def shared_names(package: Path) -> dict[str, list[str]]:
    return {
        name: modules
        for name, modules in modules_of_each_class(package).items()
        if len(modules) > 1
    }


def test_no_class_name_stands_for_two_things() -> None:
    shared = shared_names(PACKAGE)
    clashes = [
        f"{name}: {', '.join(modules)}" for name, modules in shared.items() if name not in TWINS
    ]
    assert not clashes, "rename these classes, so that each name has one meaning:\n" + "\n".join(
        clashes
    )


def test_the_permitted_twins_still_exist() -> None:
    assert set(TWINS) <= set(shared_names(PACKAGE))


def test_a_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("class Twice:\n    pass\n\n\nclass Once:\n    pass\n")
    (tmp_path / "inner" / "two.py").write_text("def f():\n    class Twice:\n        pass\n")
    (tmp_path / "made_pb2.py").write_text("class Once:\n    pass\n")
    assert shared_names(tmp_path) == {"Twice": ["inner/two.py", "one.py"]}
