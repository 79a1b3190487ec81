"""Clients of the HTTP and gRPC listeners with the verbs of `Bus`, so that one suite of tests fits every listener.

`remote_*` has all verbs; `http_*` and `grpc_*` only say how each is encoded. They are as plain as a client can be: they
do not reconnect, do not renew leases, and leave it to the broker to refuse what it can refuse.
"""
