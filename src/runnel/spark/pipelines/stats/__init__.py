"""Counts and measures messages in windows of event time, by topic and tags. Read `job.py` first.

windows    what is counted, and the aggregation; `stats_of`
job        `stats`, from its options to its end
history    `stats_history`: the same over stored messages, by a plain query
sink       where complete windows go: the table first, then topics
table      the Delta table
documents  figures as JSON, and the topics they are published to
record     what a checkpoint counts, so that another question is refused
paths      where a job reads, and where its table is
"""

__all__ = ["history", "job", "windows"]
