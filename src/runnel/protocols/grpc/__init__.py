"""The gRPC listener: `proto/runnel/v1/runnel.proto` served by grpcio, in the broker's own event loop.

    listener    the port, TLS, the standard health service and reflection
    listener        all calls under way, and their end
    admission   who is let in, and how many at a time
    service     the methods of the .proto, each joined to its verb
    calls       one call: who calls, what for, and how it ends
    publishing, reading, live, consuming, work, topics    the verbs
    messages, options, sending, leasing, positions    values of the .proto to those of the broker and back
    statuses    the one table from errors to status codes

`generated` is built by bin/proto and never edited.
"""
