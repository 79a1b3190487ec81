"""The methods of the service, by subject."""

__all__ = ["consuming", "live", "publishing", "reading", "sending", "topics", "work"]
