"""The page about gRPC names every status that a call can end with."""

from __future__ import annotations

from pathlib import Path

from runnel.protocols.grpc.server.statuses import _STATUSES, WITHOUT_CODE

_PAGE = Path(__file__).parents[3] / "docs" / "grpc.md"


def test_every_status_stands_in_the_table_of_the_page() -> None:
    rows = [line for line in _PAGE.read_text().splitlines() if line.startswith("| `")]
    for status in {*_STATUSES.values(), *WITHOUT_CODE}:
        assert any(f"`{status.name}`" in row.split("|")[1] for row in rows), status
