"""Numbers that the wire cannot carry are refused here, by name, before they end a connection."""

from __future__ import annotations

import math
from typing import Final

from runnel.errors import ClientFault

_INT64_MAX: Final = 2**63 - 1
_INT64_MIN: Final = -(2**63)


def check_natural(name: str, value: int | None) -> None:
    """None, or a whole number that is not negative."""
    if value is not None and (type(value) is not int or not 0 <= value <= _INT64_MAX):
        raise ClientFault(f"{name} is {value!r}: it must be a whole number from 0 on")


def check_time(name: str, value: int | None) -> None:
    """None, or nanoseconds in 64 bits."""
    if value is not None and (type(value) is not int or not _INT64_MIN <= value <= _INT64_MAX):
        raise ClientFault(f"{name} is {value!r}: it must be nanoseconds in 64 bits")


def milliseconds(name: str, seconds: float | None) -> int | None:
    """Seconds as the wire has them; None stays so."""
    if seconds is None:
        return None
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ClientFault(f"{name} is {seconds!r}: it must be seconds from 0 on")
    return round(seconds * 1000)
