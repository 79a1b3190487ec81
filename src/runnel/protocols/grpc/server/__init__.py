"""Calls: their limits, authentication, tasks and statuses."""
