"""What outlives segments: topics, cursors, subscriptions, producers, last values. Read `catalogue.py` first."""

__all__ = [
    "catalogue",
    "catalogue_state",
    "cursors",
    "definitions",
    "last_values",
    "log_metadata",
    "log_tables",
    "producers",
    "state_journal",
    "topic_table",
]
