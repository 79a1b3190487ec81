"""The elements of every generated page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

_WIDTH = 150
_LITERAL = re.compile(r"``([^`]+)``")


def head(title: str, *paragraphs: str) -> list[str]:
    """A page's beginning; the last paragraph says where the page comes from."""
    written = "Written by `python -m tools.reference` from the code; the words are beside what they describe."
    return [f"# {title}", "", *_spaced((*paragraphs, written))]


def prose(text: str) -> list[str]:
    """The paragraphs of a docstring or a help text. Indented text and lists stay as they are."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", textwrap.dedent(text).strip()):
        if not paragraph.strip():
            continue
        plain = escaped(_LITERAL.sub(r"`\1`", paragraph))
        if plain.startswith("- "):
            lines += [*plain.splitlines(), ""]
        else:
            joined = " ".join(line.strip() for line in plain.splitlines())
            lines += [
                *textwrap.wrap(joined, _WIDTH, break_long_words=False, break_on_hyphens=False),
                "",
            ]
    return lines


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table and the line after it; nothing, if it has no rows."""
    found = list(rows)
    if not found:
        return []
    return [
        _row(header),
        _row(["---"] * len(header), padding=""),
        *map(_row, ([cell(each) for each in row] for row in found)),
        "",
    ]


def cell(text: str) -> str:
    """Text that fits into a row: one line, and no bar that would end it."""
    return escaped(" ".join(text.split())).replace("|", r"\|")


def escaped(text: str) -> str:
    """Escapes what Markdown takes for emphasis or a tag, except between backticks."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        parts[place] = parts[place].replace("*", r"\*").replace("<", "&lt;")
    return "`".join(parts)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def page(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def anchor(heading: str) -> str:
    """The anchor that renderers of Markdown make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _row(cells: Sequence[str], padding: str = " ") -> str:
    return "|" + "|".join(f"{padding}{each}{padding}" for each in cells) + "|"


def _spaced(paragraphs: Iterable[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in (*prose(paragraph),)]
