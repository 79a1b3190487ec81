"""Records in a checkpoint of `stats` what it counts, because its half-counted windows fit only the same arguments.

Spark would continue with another length of windows, or other topics, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from runnel.errors import ClientFault
from runnel.spark.pipelines.stats.windows import Windows

_FILE: Final = "runnel-stats.json"
_BEGUN: Final = "offsets"  # Spark creates it when it plans the first micro-batch


class StatsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `stats` that must not change, by their names."""

    topics: str | None
    pattern: str | None
    window_s: float
    slide_s: float
    tags: tuple[str, ...]
    late_s: float

    @classmethod
    def of(cls, windows: Windows, options: Mapping[str, str]) -> StatsRecord:
        return cls(
            topics=options.get("topics"),
            pattern=options.get("pattern"),
            window_s=windows.length.total_seconds(),
            slide_s=windows.slide.total_seconds(),
            tags=windows.tags,
            late_s=windows.late.total_seconds(),
        )


def check_record(checkpoint: str, record: StatsRecord) -> None:
    """Write the record for a query that has not begun. ClientFault if the checkpoint has other arguments."""
    path = Path(checkpoint) / _FILE
    if not (path.exists() and (path.parent / _BEGUN).exists()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(record))
        return
    try:
        before = msgspec.json.decode(path.read_bytes(), type=StatsRecord)
    except msgspec.DecodeError as error:
        raise ClientFault(f"{path} is not what `stats` wrote there: {error}") from None
    was, now = _fields(before), _fields(record)
    for name, value in now.items():
        if was[name] != value:
            raise ClientFault(
                f"{name} is {value!r}, but the checkpoint {checkpoint} was begun with {was[name]!r}, and has "
                "half-counted windows of that: use another name or checkpoint"
            )


def _fields(record: StatsRecord) -> dict[str, Any]:
    return msgspec.structs.asdict(record)
