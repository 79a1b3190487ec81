"""Consumers that poll: what they hold between two requests."""
