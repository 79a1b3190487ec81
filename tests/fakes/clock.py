"""The clock that a test moves. It is public: `runnel.testing` offers it to other test suites."""

from runnel.testing.clock import NS_PER_SECOND, VirtualClock

__all__ = ["NS_PER_SECOND", "VirtualClock"]
