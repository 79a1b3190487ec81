"""Tests of the gRPC door."""
