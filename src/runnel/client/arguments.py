"""Checks arguments, and refuses by name those that the wire cannot carry, before they end a connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from runnel.errors import ClientFault
from runnel.topics.names import Label, check_label, check_text
from runnel.topics.patterns import Pattern

_INT64_MAX: Final = 2**63 - 1
_INT64_MIN: Final = -(2**63)
_SECONDS_MAX: Final = _INT64_MAX // 10**9  # as nanoseconds they need 64 bits


def check_natural(name: str, value: int | None) -> None:
    """Check for None, or a whole number that is not negative."""
    if value is not None and (type(value) is not int or not 0 <= value <= _INT64_MAX):
        raise ClientFault(f"{name} is {value!r}: it must be a whole number from 0 on")


def check_time(name: str, value: int | None) -> None:
    """Check for None, or nanoseconds in 64 bits."""
    if value is not None and (type(value) is not int or not _INT64_MIN <= value <= _INT64_MAX):
        raise ClientFault(f"{name} is {value!r}: it must be nanoseconds in 64 bits")


def milliseconds(name: str, seconds: float | None) -> int | None:
    """Seconds as milliseconds, which the wire has; None stays None."""
    if seconds is None:
        return None
    if not isinstance(seconds, int | float) or not 0 <= seconds <= _SECONDS_MAX:
        raise ClientFault(f"{name} is {seconds!r}: it must be seconds from 0 to {_SECONDS_MAX}")
    return round(seconds * 1000)


def check_patterns(patterns: Sequence[str]) -> None:
    """Check that these are patterns of topics."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ClientFault(f"{pattern!r:.200} is no pattern of topics: each must be text")
        Pattern(pattern)  # raises an error that says what is wrong


def check_subscription(name: str) -> None:
    """Check the name of a subscription."""
    if not isinstance(name, str):
        raise ClientFault(f"{name!r} is no name of a subscription: it must be text")
    check_label(Label.SUBSCRIPTION, name)


def check_member(name: str) -> None:
    """Check the name of a multicast's member."""
    if not isinstance(name, str):
        raise ClientFault(f"{name!r} is no name of a member: it must be text")
    check_text("member name", name)


def reason_text(reason: str) -> str:
    """The reason of a failure for the wire. Texts of errors may contain anything: what has no UTF-8 is escaped."""
    if not isinstance(reason, str):
        raise ClientFault(f"the reason is {reason!r:.200}: it must be text")
    return reason.encode("utf-8", "backslashreplace").decode()
