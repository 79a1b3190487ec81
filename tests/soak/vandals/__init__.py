"""Hostile clients, one of each protocol: `vandal` is their common frame, each other module one list of attacks."""
