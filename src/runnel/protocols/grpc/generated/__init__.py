"""Built from proto/runnel/v1/runnel.proto by bin/proto: never edited."""

__all__ = ["runnel_pb2"]
