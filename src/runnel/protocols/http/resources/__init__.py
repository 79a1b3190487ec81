"""The routes of the REST API, one module per resource."""

__all__ = [
    "cursors",
    "health",
    "live",
    "messages",
    "metrics",
    "page",
    "publish",
    "statistics",
    "topics",
    "work",
]
