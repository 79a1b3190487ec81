"""Finds the line of each key in a TOML text, for messages that point at a line.

A scan by lines, much simpler than a parser: it knows headers, bare and dotted keys at the start of a line, and text in
triple quotes. It does not find keys inside inline tables and arrays; callers fall back to the key that holds them.
"""

from __future__ import annotations

import re
from typing import Final

_HEADER: Final = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_KEY: Final = re.compile(r"""\s*([A-Za-z0-9_."' -]+?)\s*=""")
_TRIPLE_QUOTE: Final = re.compile(r'"""|\'\'\'')


def key_lines(text: str) -> dict[str, int]:
    """The line (from 1) of every key and header. Rules have an index: `topics[0].match`."""
    lines: dict[str, int] = {}
    array_sizes: dict[str, int] = {}
    table = ""
    open_quote = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not open_quote:
            if header := _HEADER.fullmatch(line):
                table = _table_name(header[2], array_sizes, is_array_item=header[1] == "[[")
                lines.setdefault(table, number)
                table += "."
            elif key := _KEY.match(line):
                lines.setdefault(f"{table}{_unquoted(key[1])}", number)
        for quote in _TRIPLE_QUOTE.findall(line):
            if not open_quote:
                open_quote = quote
            elif quote == open_quote:
                open_quote = ""
    return lines


def _table_name(header: str, array_sizes: dict[str, int], *, is_array_item: bool) -> str:
    name = _unquoted(header)
    if is_array_item:
        array_sizes[name] = array_sizes.get(name, 0) + 1
        return f"{name}[{array_sizes[name] - 1}]"
    # [topics.rotate] belongs to the last rule before it.
    first, dot, rest = name.partition(".")
    if dot and first in array_sizes:
        return f"{first}[{array_sizes[first] - 1}].{rest}"
    return name


def _unquoted(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))
