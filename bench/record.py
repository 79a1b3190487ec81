"""What was measured, kept part by part: one JSON file a benchmark, replaced whole whenever a part is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.report import Result, as_rows, from_row

FOLDER = Path(__file__).parent / "results"
QUICK_FOLDER = FOLDER / "quick"  # kept apart: figures of a quick run are never shown as results
_RUN = "run.json"


class PartRecord(msgspec.Struct, frozen=True):
    """One part as it came out the last time, or how it failed."""

    title: str
    measured_at: str  # UTC, as ISO 8601 has it: sorts as text
    seconds: float
    is_quick: bool
    machine: dict[str, str]
    results: tuple[Result, ...] = ()
    failure: str = ""

    @property
    def is_good(self) -> bool:
        return not self.failure


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _path(folder: Path, benchmark: str) -> Path:
    return folder / f"{benchmark}.json"


def read(folder: Path, benchmark: str) -> dict[str, PartRecord]:
    """By title; nothing if it has not been run yet."""
    try:
        data = _path(folder, benchmark).read_bytes()
    except FileNotFoundError:
        return {}
    parts: list[dict[str, object]] = msgspec.json.decode(data)["parts"]
    return {record.title: record for record in map(_from_document, parts)}


def _from_document(document: dict[str, object]) -> PartRecord:
    rows = document.get("results")
    assert isinstance(rows, list), document
    plain = msgspec.convert(document | {"results": []}, PartRecord)
    return msgspec.structs.replace(plain, results=tuple(from_row(row) for row in rows))


def keep(folder: Path, benchmark: str, record: PartRecord, titles: Sequence[str]) -> None:
    """Put a part beside the others of its benchmark, in the order of `titles`.

    A failure does not take the place of an earlier result: that is kept, and the failure is told with it.
    """
    parts = read(folder, benchmark)
    before = parts.get(record.title)
    if record.failure and before is not None and before.results:
        record = msgspec.structs.replace(before, failure=record.failure)
    parts[record.title] = record
    ordered = [parts[title] for title in titles if title in parts]
    document = {
        "benchmark": benchmark,
        "parts": [
            msgspec.structs.asdict(part) | {"results": as_rows(part.results)} for part in ordered
        ],
    }
    _replace(_path(folder, benchmark), document)


def _replace(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    fresh.replace(path)


# --- Runs of everything ---


def begin_run(folder: Path) -> None:
    """From now on whatever was measured before is old, to one who asks what is missing."""
    _replace(folder / _RUN, {"begun_at": now()})


def is_missing(folder: Path, record: PartRecord | None) -> bool:
    """Does the last run of everything still lack it: never measured, failed, or older than that run?"""
    if record is None or not record.is_good:
        return True
    try:
        begun_at = msgspec.json.decode((folder / _RUN).read_bytes())["begun_at"]
    except FileNotFoundError:
        return False
    return record.measured_at < str(begun_at)


def results_of(parts: Mapping[str, PartRecord]) -> list[Result]:
    return [result for record in parts.values() for result in record.results]
