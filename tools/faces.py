"""An import-linter contract: modules outside a folder import the folder itself, and none of the modules in it.

What a folder's `__init__` re-exports is its face. A module that others use as a whole (`paths.segment_path(…)`) can be
part of the face too: `open_modules` names it.
"""

from __future__ import annotations

from typing import Any

import grimp
from importlinter import Contract, ContractCheck, fields, output


class FacesContract(Contract):
    """Reports every import that reaches behind the face of one of `folders`."""

    type_name = "faces"

    folders: Any = fields.ListField(subfield=fields.StringField())
    open_modules: Any = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002, FBT001 - its interface
        folders: list[str] = self.folders
        open_modules: set[str] = self.open_modules or set()
        unknown = [name for name in (*folders, *open_modules) if name not in graph.modules]
        reached = [
            line
            for folder in folders
            if folder not in unknown
            for line in _behind_the_face(graph, folder, open_modules)
        ]
        return ContractCheck(
            kept=not unknown and not reached, metadata={"unknown": unknown, "reached": reached}
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        for name in check.metadata["unknown"]:
            output.print_error(f"{name}: there is no such module")
        for line in check.metadata["reached"]:
            output.print_error(line)


def _behind_the_face(graph: grimp.ImportGraph, folder: str, open_modules: set[str]) -> list[str]:
    inside = graph.find_descendants(folder)
    found = []
    for module in sorted(inside - open_modules):
        for importer in sorted(graph.find_modules_that_directly_import(module) - inside - {folder}):
            details = graph.get_import_details(importer=importer, imported=module)
            lines = ", ".join(str(detail["line_number"]) for detail in details)
            found.append(f"{importer} line {lines} imports {module}: import it from {folder}")
    return found
