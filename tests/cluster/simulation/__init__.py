"""Histories of a cluster: nodes that are killed, pause, drain and start again, and clients that follow the owners."""
