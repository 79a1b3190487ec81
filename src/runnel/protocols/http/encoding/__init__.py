"""Requests and answers as text and bytes: messages as JSON, parameters, problems, server-sent events."""

__all__ = [
    "blocks",
    "event_ids",
    "event_stream",
    "exposition",
    "messages",
    "parameters",
    "problems",
    "raw_messages",
    "sent_last_values",
]
