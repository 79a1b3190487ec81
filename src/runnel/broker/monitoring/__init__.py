"""Metrics, events and the audit trail of a broker. Read `monitor.py` first."""

__all__ = [
    "audit",
    "events",
    "exposed_metrics",
    "histogram",
    "metric_tables",
    "metrics",
    "monitor",
    "reporter",
    "store_statistics",
    "throttled",
    "topic_traffic",
]
