"""Whether what was printed is what the page shows: line by line, apart from what differs from run to run."""

from __future__ import annotations

import re
from typing import Final

ANY: Final = "…"
_TOLD_LINES_MAX: Final = 40

# The first that fits a place counts; each match becomes its name, in what is expected and in what was printed.
_VARYING: Final = (
    ("time", re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|\+00:00)?")),
    ("time", re.compile(r"\b\d\d:\d\d:\d\d(\.\d+)?\b")),
    ("nanoseconds", re.compile(r"\b1[6-9]\d{17}\b")),
    ("token", re.compile(r"\brunnel_[0-9a-f]{12}_[\w-]*…?")),
    ("rate", re.compile(r"\b[\d.,]+ ?([kM]|[KMGT]i?B|B| messages)?/s\b")),
    ("size", re.compile(r"\b[\d.,]+ ([KMGT]i)?B\b")),
    ("duration", re.compile(r"\b[\d.]+ ?(ns|µs|us|ms|s|min|h)\b")),
)
_NUMBER: Final = re.compile(r"-?\b\d[\d.,]*\b")
_STEERING: Final = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[=>])")


def plain(data: bytes) -> str:
    """What a terminal got, as text: without colours and returns of the carriage."""
    return _STEERING.sub("", data.decode(errors="replace")).replace("\r", "")


def pattern_of(expected: str, *, do_numbers_vary: bool = False) -> re.Pattern[str]:
    """What fits an output that is shown so; to be held against `normal` text."""
    parts = []
    for line in normal(expected, do_numbers_vary=do_numbers_vary).splitlines():
        if line.strip() == ANY:
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            literal = re.escape(line.strip()).replace(re.escape(ANY), r"[^\n]*?")
            parts.append(literal + r"\n")
    return re.compile("".join(parts))


def normal(text: str, *, do_numbers_vary: bool = False) -> str:
    """What varies is named, blanks count once, empty lines do not, and every line ends."""
    for name, varying in _VARYING:
        text = varying.sub(f"<{name}>", text)
    if do_numbers_vary:
        text = _NUMBER.sub("<number>", text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return "".join(f"{line}\n" for line in lines if line)


def difference(expected: str, printed: str, *, do_numbers_vary: bool = False) -> str | None:
    """None if the whole of what was printed is as expected; otherwise both, to be read."""
    pattern = pattern_of(expected, do_numbers_vary=do_numbers_vary)
    if pattern.fullmatch(normal(printed, do_numbers_vary=do_numbers_vary)):
        return None
    return f"the page shows\n{expected}\nand this was printed\n{end_of(printed)}"


def end_of(text: str) -> str:
    """The beginning of a long text."""
    lines = text.splitlines()
    return "\n".join(["…", *lines[-_TOLD_LINES_MAX:]] if len(lines) > _TOLD_LINES_MAX else lines)
