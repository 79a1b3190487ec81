"""Connections and requests: limits, authentication, paths, bodies, answers."""
