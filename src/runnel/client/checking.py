"""Numbers that the wire cannot carry are refused here, by name, before they end a connection."""

from __future__ import annotations

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
