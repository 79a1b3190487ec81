"""The HTTP listener: REST with JSON, live reading as server-sent events, Prometheus. Its extra is `http`.

A request's way: `connection` (bytes become a request) → `front` (who asks, and may this page ask?) → Litestar, by
`app` → a handler, as in `publishing` → `Access`. Everything that is refused leaves as a problem (`problems`).
"""
