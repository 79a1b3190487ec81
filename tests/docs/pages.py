"""What is on a page: its code blocks, and the comments that say how each of them is run.

CONTRIBUTING.md has the grammar of the comments. Whatever is not known here is refused, so that no block of a
new page escapes by a slip of the pen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = tuple(
    sorted(
        str(path.relative_to(ROOT))
        for path in (
            *ROOT.glob("*.md"),
            *(ROOT / "docs").rglob("*.md"),
            *(ROOT / "examples").rglob("*.md"),
        )
        if "node_modules" not in path.parts
    )
)

_COMMENT: Final = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
# What a tool writes into a page between two such comments.
_PART: Final = re.compile(r"[\w -]+: (begin|end)")


class Word(StrEnum):
    """What a comment begins with."""

    # Of the block below it.
    KEEPS_RUNNING = "keeps running"
    RUNS_UNTIL = "runs until"
    OUTPUT_OF = "output of"
    EXIT_CODE = "exit code"
    NUMBERS_VARY = "numbers vary"
    FILE = "file"
    DRAWING = "drawing"
    TESTED_BY = "tested by"
    ONLY_PARSED = "only parsed"
    # Standing alone.
    BROKER = "broker"
    NEEDS = "needs"
    IN = "in"
    AFTER = "after"
    HIDDEN = "hidden"
    CTRL_C = "ctrl-c"
    KILL = "kill"


_WORDS: Final = frozenset(word.value for word in Word)
_ALONE: Final = frozenset(
    {Word.BROKER, Word.NEEDS, Word.IN, Word.AFTER, Word.HIDDEN, Word.CTRL_C, Word.KILL}
)


class PageError(AssertionError):
    """A page is not what the grammar allows; the text says where, and what would be right."""


class Remark(msgspec.Struct, frozen=True):
    """A comment that stands alone."""

    page: str
    line: int
    word: Word
    value: str


class Block(msgspec.Struct, frozen=True):
    """A code block, with the comments directly above it."""

    page: str
    line: int  # of its first line of code
    language: str
    text: str
    notes: dict[Word, str] = {}

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language})"


def items_of(page: str) -> list[Remark | Block]:
    """The blocks and remarks of a page of this repository, in its order."""
    return list(parse(page, (ROOT / page).read_text(encoding="utf-8")))


def needs(page: str, what: str) -> bool:
    """Whether a page says so: `spark`, or `node`. Also of a page that is wrong elsewhere."""
    return f"<!-- {Word.NEEDS}: {what} -->" in (ROOT / page).read_text(encoding="utf-8")


def parse(page: str, text: str) -> Iterator[Remark | Block]:
    """The same of any text."""
    comments: list[tuple[Token, Remark]] = []
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "html_block":
            comments += ((token, remark) for remark in _remarks(page, token))
        elif token.type == "code_block":
            raise PageError(
                f"{page}:{_span(token)[0] + 1}: a code block by indentation cannot say its language; put it between ```"
            )
        elif token.type == "fence":
            above = _directly_above(token, comments)
            yield from _alone(comments[: len(comments) - len(above)])
            yield from (remark for _, remark in above if remark.word in _ALONE)
            yield _block(page, token, [remark for _, remark in above if remark.word not in _ALONE])
            comments = []
    yield from _alone(comments)


def _span(token: Token) -> tuple[int, int]:
    """Its first line, counted from 0, and the one behind its last."""
    assert token.map is not None
    return token.map[0], token.map[1]


def _remarks(page: str, token: Token) -> Iterator[Remark]:
    line = _span(token)[0] + 1
    for said in _COMMENT.findall(token.content):
        if _PART.fullmatch(said):
            continue
        word, _, value = said.partition(":")
        if word.strip() not in _WORDS:
            known = ", ".join(sorted(_WORDS))
            raise PageError(
                f"{page}:{line}: no comment begins with {word.strip()!r}; there are {known}"
            )
        yield Remark(page, line, Word(word.strip()), value.strip())


def _directly_above(
    fence: Token, comments: list[tuple[Token, Remark]]
) -> list[tuple[Token, Remark]]:
    """Those between which and the fence there is no other line."""
    begin = _span(fence)[0]
    found = []
    for token, remark in reversed(comments):
        if _span(token)[1] != begin:
            break
        begin = _span(token)[0]
        found.append((token, remark))
    return found[::-1]


def _alone(comments: list[tuple[Token, Remark]]) -> Iterator[Remark]:
    for _, remark in comments:
        if remark.word not in _ALONE:
            raise PageError(
                f"{remark.page}:{remark.line}: {remark.word!r} has to stand directly above a block"
            )
        yield remark


def _block(page: str, fence: Token, remarks: list[Remark]) -> Block:
    language, line = fence.info.strip(), _span(fence)[0] + 2
    if not language:
        raise PageError(
            f"{page}:{line}: a block has to say its language; `text` for output and drawings"
        )
    notes = {remark.word: remark.value for remark in remarks}
    return Block(page, line, language, fence.content, notes)
