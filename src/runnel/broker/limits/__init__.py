"""Limits and fairness, so that one client does not slow the others. Read `quotas.py` first.

quotas, rates     how many topics, cursors and subscriptions a token may create, and how fast it publishes and reads
fair_semaphore    connections take turns, however many waiters one of them has
loop_share        walks over large collections share the event loop
"""

__all__ = ["fair_semaphore", "loop_share", "quotas"]
