"""The gRPC listener: grpcio serves `proto/runnel/v1/runnel.proto` in the broker's own event loop.

listener     the port, TLS, the standard health service and reflection
service      joins each method of the .proto to its verb
server/      calls: admission, limits, tasks, status codes, and their end
methods/     the verbs
encoding/    values of the .proto become values of the broker, and back
generated/   built by bin/proto, never edited
"""

__all__ = ["listener"]
