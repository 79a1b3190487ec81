"""The end of the simulated process."""

from __future__ import annotations


class PowerLoss(BaseException):
    """The machine lost power, or the process was killed: no code of that process may go on.

    Not an Exception, so that nothing which handles errors can handle it.
    """
