"""Connections and requests: limits, authentication, paths, bodies, answers. Read `front.py` first."""

__all__ = ["answers", "bodies", "browsers", "calls", "front", "http_server", "requests"]
