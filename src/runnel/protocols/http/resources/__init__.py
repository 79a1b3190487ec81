"""The routes of the REST API, one module per resource."""

__all__ = [
    "consuming",
    "cursors",
    "health",
    "live",
    "messages",
    "metrics",
    "page",
    "publishing",
    "statistics",
    "topics",
]
