"""One folder for each protocol: it turns bytes into the broker's verbs, and answers into bytes."""

__all__ = ["grpc", "http", "native"]
