"""Pipelines over stored streams: each a function here and a command of `runnel pipeline`.

archive/         topics into a Delta table, each message once
replay/          from an archive, journal files or a broker back into topics
stats/           counts, bytes and latencies in windows of event time
sql, statement   one SQL statement from topics into a topic or a table
project          the user's own Declarative Pipelines
payload_parser   payloads as columns
streaming_query  what pipelines that run as streaming queries share
target           the topic or table that rows go to
"""

__all__ = [
    "archive",
    "payload_parser",
    "project",
    "replay",
    "sql",
    "statement",
    "stats",
    "streaming_query",
    "target",
]
