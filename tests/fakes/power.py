"""The end of the simulated process."""

from __future__ import annotations


class PowerLoss(BaseException):
    """The machine lost power, or the process was killed: no code of that process may continue.

    Not an Exception, so that no error handler catches it.
    """
