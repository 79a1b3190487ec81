"""Tables, JSON documents, counts, sizes and durations as the commands print them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import typer

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_WIDTH_MAX: Final = 1 << 16  # more than any table needs


class Table(msgspec.Struct, frozen=True):
    """Rows of text. Columns named in `numbers` are aligned to the right."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: frozenset[str] = frozenset()

    def show(self) -> None:
        """Print the table to standard output: drawn by rich on a terminal, otherwise as aligned text."""
        if sys.stdout is not None and sys.stdout.isatty():
            self._show_rich()
        else:
            for line in self.lines():
                typer.echo(line)

    def lines(self) -> list[str]:
        """Aligned plain text, two spaces between columns."""
        cells = [self.columns, *(tuple(map(printable, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return [
            "  ".join(
                cell.rjust(width) if name in self.numbers else cell.ljust(width)
                for name, cell, width in zip(self.columns, row, widths, strict=True)
            ).rstrip()
            for row in cells
        ]

    def renderable(self) -> RichTable:
        """The table as a rich object."""
        # Rarely needed, and slow to import.
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in self.columns:
            is_number = name in self.numbers
            table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        return table

    def _show_rich(self) -> None:
        from rich.console import Console

        table = self.renderable()
        console = Console()
        # A user can read lines that a narrow terminal wraps, but not columns that rich squeezes.
        wanted = Console(width=_WIDTH_MAX).measure(table).maximum
        console.width = max(console.width, wanted)
        console.print(table)


def json_text(document: object) -> str:
    """An indented JSON document."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def printable(text: str) -> str:
    """Replace control characters: names come from publishers, and must not control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def human_bytes(size: float) -> str:
    """A rounded size, in the largest unit that leaves at least 1."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def counted(count: int, thing: str, things: str | None = None) -> str:
    """`1 segment`, `2 segments`."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def human_time(duration_ns: float) -> str:
    """A rounded duration of three digits, in the largest of s, ms, µs and ns that leaves at least 1."""
    for unit, size_ns in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if duration_ns >= size_ns:
            amount = duration_ns / size_ns
            return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"
    return f"{duration_ns:.0f} ns"
