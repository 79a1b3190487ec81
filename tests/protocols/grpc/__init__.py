"""Tests of the gRPC listener."""
