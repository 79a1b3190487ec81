"""Inspects the text of an SQL statement: its kind, its streamed names, and the place of an error. Pure.

Spark parses statements. This module only finds the few words that Runnel has to know before that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from runnel.errors import ClientFault

# The order matters: a match inside a comment or a text is neither word nor name.
_TOKEN: Final = re.compile(
    r"""
      --[^\n]*                                  # a comment to the end of its line
    | /\*.*?\*/
    | '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.)*"  # texts
    | `(?:[^`]|``)*`                            # a name in backticks
    | \w+                                       # a word, or a name
    | \S
    """,
    re.VERBOSE | re.DOTALL,
)
_NAME_PART: Final = re.compile(r"`(?:[^`]|``)*`|[^.`]+")
_QUERY_WORDS: Final = frozenset(("select", "with", "from", "values", "table", "("))

_POSITION: Final = re.compile(r"\(?line (\d+),? pos (\d+)\)?")
_CONDITION: Final = re.compile(r"^\[[A-Z0-9_.]+\]\s*")
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+")


def _tokens(statement: str) -> Iterator[str]:
    for found in _TOKEN.finditer(statement):
        token = found[0]
        if not token.startswith(("--", "/*")):
            yield token


def check_query(statement: str) -> None:
    """Refuse a statement that is not a query, because Spark would run it at once."""
    first = next(_tokens(statement), None)
    if first is None:
        raise ClientFault("the statement is empty: SELECT … FROM STREAM name")
    if first.lower() not in _QUERY_WORDS:
        raise ClientFault(
            f"the statement begins with {first}: it must be a query, as SELECT … FROM STREAM name"
        )


def streamed_names(statement: str) -> frozenset[str]:
    """The names that follow the word STREAM: a and b in `FROM STREAM a JOIN STREAM(b)`."""
    tokens = list(_tokens(statement))
    found = set()
    for place, token in enumerate(tokens[:-1]):
        if token.lower() != "stream" or (
            place and tokens[place - 1].lower() not in ("from", "join", ",")
        ):
            continue
        at = place + (2 if tokens[place + 1] == "(" else 1)
        if at < len(tokens) and (tokens[at][0] == "`" or re.fullmatch(r"\w+", tokens[at])):
            found.add(unquoted(tokens[at]))
    return frozenset(found)


def name_parts(name: str) -> list[str]:
    """The parts of a name as Spark's errors show it: `a`.`b` has two."""
    return [unquoted(part) for part in _NAME_PART.findall(name)]


def unquoted(name: str) -> str:
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def explained(statement: str, error: str) -> str:
    """Spark's error about a statement: its sentence and the place in the statement, without plans and Java traces."""
    sentence = error.strip().partition("\n\n== SQL ==")[0].partition("\nJVM stacktrace")[0]
    position = _POSITION.search(sentence)
    # The plan follows the position, line by line.
    sentence = sentence[: position.start()] if position else sentence.partition(";\n'")[0]
    sentence = _STATE.sub("", _CONDITION.sub("", sentence)).rstrip(" ;\n")
    if position is None:
        return sentence
    line, column = int(position[1]), int(position[2])
    lines = statement.splitlines()
    if not 1 <= line <= len(lines):
        return f"{sentence} (line {line}, column {column + 1})"
    return (
        f"{sentence}\n  line {line}: {lines[line - 1]}\n{' ' * (len(f'  line {line}: ') + column)}^"
    )
