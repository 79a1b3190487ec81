"""Messages counted and measured in windows of event time, by topic and tags.

windows    what is counted where, and the aggregation; `stats_of`
running    `stats`, from its options to its end
history    `stats_history`: the same over what is stored, by a plain query
sink       where complete windows go: the table first, then topics
table      the Delta table
documents  figures as JSON, and the topics they are published to
record     what a checkpoint counts, so that another question is refused
places     where it reads, and where its table is
"""
