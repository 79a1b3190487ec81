"""What outlives segments: topics, cursors, subscriptions, producers, last values. Read `records.py` first."""

__all__ = [
    "catalogue",
    "cursors",
    "definitions",
    "format_one",
    "last_values",
    "log_metadata",
    "log_tables",
    "metadata_state",
    "producers",
    "record_journal",
    "recorded_shard",
    "records",
    "shared_metadata",
    "shared_records",
    "sqlite",
    "state_journal",
    "topic_table",
]
