"""Live reading: subscriptions by topic pattern, their feeds from the log, and ephemeral topics. Read `subscriptions.py` first."""

__all__ = [
    "ephemeral_publisher",
    "ephemeral_topics",
    "feeds",
    "start_positions",
    "subscription",
    "subscriptions",
]
