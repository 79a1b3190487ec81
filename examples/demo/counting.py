"""Counts Spark's tables again from their files, without Spark and without the broker."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
from deltalake import DeltaTable

from examples.demo.evidence import Sum, TopicRows, WindowsFound


def count_archive(table: Path) -> dict[str, TopicRows]:
    """Every topic of a Delta table, from its Parquet files."""
    rows = DeltaTable(str(table)).to_pyarrow_table(columns=["topic", "offset", "payload"])
    found = {}
    for topic in pc.unique(rows["topic"]).to_pylist():
        own = rows.filter(pc.equal(rows["topic"], topic))
        sums = Sum()
        for payload in own["payload"].to_pylist():
            sums.add(payload)
        ends = pc.min_max(own["offset"]).as_py()
        found[topic] = TopicRows(
            rows=sums,
            first_offset=ends["min"],
            last_offset=ends["max"],
            distinct=pc.count_distinct(own["offset"]).as_py(),
        )
    return dict(sorted(found.items()))


def count_windows(table: Path) -> WindowsFound:
    """Every message is in one window, in time or late."""
    columns = ["messages", "bytes", "late_messages", "late_bytes"]
    rows = DeltaTable(str(table)).to_pyarrow_table(columns=columns)
    sums = {name: pc.sum(rows[name]).as_py() or 0 for name in columns}
    return WindowsFound(
        rows=rows.num_rows,
        messages=sums["messages"] + sums["late_messages"],
        size_bytes=sums["bytes"] + sums["late_bytes"],
    )
