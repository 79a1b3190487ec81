"""Live reading: subscriptions by topic pattern, feeds from the log, ephemeral topics. Read `subscriptions.py` first."""

__all__ = [
    "beginnings",
    "ephemeral_publisher",
    "ephemeral_topics",
    "feeds",
    "start_positions",
    "subscription",
    "subscriptions",
]
