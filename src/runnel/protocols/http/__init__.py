"""The HTTP listener: REST with JSON, live reading as server-sent events, Prometheus. Its extra is `http`.

A request passes `server/connection.py` (bytes become a request), `server/front.py` (authentication, browser rules),
Litestar by `app.py`, a handler in `resources/`, and `Access`. A refused request is answered with a problem
(`encoding/problems.py`).
"""

__all__ = ["app", "listener"]
