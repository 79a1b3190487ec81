"""Consumers that poll: the broker keeps their leases between two requests. Read `polling_consumer.py` first."""

__all__ = ["ack_ids", "polling_consumer", "polling_consumers"]
