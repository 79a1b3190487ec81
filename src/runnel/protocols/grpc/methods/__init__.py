"""The methods of the service, by subject."""

__all__ = [
    "consume_stream",
    "fetch",
    "live",
    "publish_requests",
    "publish_stream",
    "topics",
    "work",
]
