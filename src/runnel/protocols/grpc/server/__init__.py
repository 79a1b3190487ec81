"""Calls: their limits, authentication, tasks and statuses. Read `calls.py` first."""

__all__ = [
    "admission",
    "calls",
    "grpc_server",
    "outbox",
    "public",
    "statuses",
    "sturdy_server",
    "two_way_stream",
]
