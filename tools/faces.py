"""An import-linter contract: modules outside a folder use the folder's face, and no other module in it.

A folder's face is what `__all__` in its `__init__` names: classes and functions that the `__init__` re-exports, and
modules that others use as a whole. A module imports a neighbour's insides only if both lie in the same folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grimp
from importlinter import Contract, ContractCheck, fields, output


class FacesContract(Contract):
    """Reports every import that reaches behind the face of a folder, and every face that names what does not exist."""

    type_name = "faces"

    package: Any = fields.StringField()

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002, FBT001 - its interface
        package = find_spec(self.package)
        if package is None or package.origin is None:
            raise ValueError(f"the contract's package, {self.package}, is not installed")
        faults = list(_faults(graph, Path(package.origin).parent))
        return ContractCheck(kept=not faults, metadata={"faults": faults})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for fault in check.metadata["faults"]:
            output.print_error(fault)


def _faults(graph: grimp.ImportGraph, source: Path) -> Iterator[str]:
    for path in sorted(source.rglob("__init__.py")):
        folder = ".".join(path.parent.relative_to(source.parent).parts)
        if path.parent == source or folder not in graph.modules:
            continue
        exported, defined = _names(path)
        for name in sorted(exported - defined):
            if f"{folder}.{name}" not in graph.modules:
                yield f"{folder}: __all__ names {name}, which is neither a module nor imported there"
        for child in sorted(graph.find_children(folder)):
            if child.rpartition(".")[2] not in exported:
                yield from _reached(graph, folder, child)


def _reached(graph: grimp.ImportGraph, folder: str, child: str) -> Iterator[str]:
    inside = graph.find_descendants(folder) | {folder}
    for module in sorted({child, *graph.find_descendants(child)}):
        for importer in sorted(graph.find_modules_that_directly_import(module) - inside):
            details = graph.get_import_details(importer=importer, imported=module)
            lines = ", ".join(str(detail["line_number"]) for detail in details)
            yield f"{importer} line {lines} imports {module}, which is not in the face of {folder}"


def _names(init: Path) -> tuple[set[str], set[str]]:
    """What `__all__` names, and the names that the `__init__` imports or defines."""
    exported: set[str] = set()
    defined: set[str] = set()
    for node in ast.walk(ast.parse(init.read_text())):
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names)):
                exported = {str(name.value) for name in names if isinstance(name, ast.Constant)}
            case ast.ImportFrom(names=names):
                defined |= {name.asname or name.name for name in names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name):
                defined.add(name)
            case _:
                pass
    return exported, defined
