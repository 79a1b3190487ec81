"""The clock that a test holds in its hand is part of what Runnel offers to the tests of others."""

from runnel.testing.clock import NS_PER_SECOND, VirtualClock

__all__ = ["NS_PER_SECOND", "VirtualClock"]
