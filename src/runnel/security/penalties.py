"""Delays the answer to a wrong token: the longer, the more wrong tokens an address has sent lately.

Right tokens never wait. Tokens cannot be guessed; the delay is for clients that try all the same, and for clients that
keep asking with a revoked token. The number of waiting answers is bounded, for each address and in all; beyond that
the answer comes at once, so that waiting answers cannot pile up. The longest delay is shorter than the timeout of
clients: they get the reason, and do not take the broker for one that does not answer.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger

logger = get_logger("runnel.security")

_FIRST_SECONDS: Final = 0.1
_SECONDS_MAX: Final = 2.0
_DOUBLINGS_MAX: Final = 10
_FORGIVEN_AFTER_NS: Final = 60 * 1_000_000_000
_ORIGINS_MAX: Final = 10_000
_WAITING_PER_ORIGIN_MAX: Final = 8
_WAITING_MAX: Final = 1000
# However many addresses fail, they must not fill the diagnostics.
_LINES_PER_MINUTE_MAX: Final = 60
_MINUTE_NS: Final = 60 * 1_000_000_000

_ORIGIN_CHARS_MAX: Final = 64
# `127.0.0.1:7470`, `[::1]:7470`, and as gRPC writes them: `ipv4:127.0.0.1:7470`, `ipv6:%5B::1%5D:7470`.
_ADDRESS: Final = re.compile(
    r"(?:ipv[46]:)?(?:\[|%5B)?(?P<host>[0-9A-Fa-f:.]+?)(?:%[^\]:]*)?(?:\]|%5D)?(?::\d{1,5})?"
)
# The owner of an IPv6 address usually has all addresses with this prefix.
_IPV6_PREFIX: Final = 64


class Penalties:
    """Counts the recent failures of each address, and delays answers accordingly."""

    def __init__(self, clock: Clock, event: str = "a token was refused") -> None:
        """`event` is the text of the log lines."""
        self._clock = clock
        self._event = event
        # The number of failures of each origin, and the time of the last one; the longest quiet origin first.
        self._failures: dict[str, tuple[int, int]] = {}
        self._waiting: dict[str, int] = {}
        self._waiting_count = 0
        self._minute_ns = 0
        self._lines = 0
        self.failure_count = 0
        """All failures since the broker began."""

    @property
    def waiting_count(self) -> int:
        return self._waiting_count

    async def wait(self, address: str) -> None:
        """Count a wrong token, and wait before it is answered. A port in `address` does not matter."""
        origin = origin_of(address)
        seconds = self._count(origin)
        waiting = self._waiting.get(origin, 0)
        if waiting >= _WAITING_PER_ORIGIN_MAX or self._waiting_count >= _WAITING_MAX:
            return
        self._waiting[origin] = waiting + 1
        self._waiting_count += 1
        try:
            await self._clock.sleep(seconds)
        finally:
            self._waiting_count -= 1
            self._waiting[origin] -= 1
            if not self._waiting[origin]:
                del self._waiting[origin]

    def note(self, address: str) -> None:
        """Count and log a failure that does not have to wait."""
        self._count(origin_of(address))

    def _count(self, origin: str) -> float:
        """Count one more failure of an origin; returns how many seconds its answer waits."""
        self.failure_count += 1
        now_ns = self._clock.monotonic_ns()
        count, last_ns = self._failures.pop(origin, (0, now_ns))
        if now_ns - last_ns > _FORGIVEN_AFTER_NS:
            count = 0
        if len(self._failures) >= _ORIGINS_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[origin] = (count + 1, now_ns)
        if count & (count + 1) == 0:  # the 1st, 2nd, 4th, 8th …
            self._log(origin, count + 1, now_ns)
        return min(_SECONDS_MAX, _FIRST_SECONDS * 2.0 ** min(count, _DOUBLINGS_MAX))

    def _log(self, origin: str, times: int, now_ns: int) -> None:
        if now_ns - self._minute_ns > _MINUTE_NS:
            self._minute_ns = now_ns
            self._lines = 0
        self._lines += 1
        if self._lines <= _LINES_PER_MINUTE_MAX:
            logger.warning(self._event, address=origin, times=times)


def origin_of(address: str) -> str:
    """The addresses that one party usually has: an IPv4 address, or an IPv6 /64. Other texts stay as they are."""
    found = _ADDRESS.fullmatch(address)
    candidates = [address] if found is None else [address, found["host"]]
    for text in candidates:
        try:
            ip = ipaddress.ip_address(text)
        except ValueError:
            continue
        if isinstance(ip, ipaddress.IPv4Address):
            return str(ip)
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        if ip.is_loopback:
            return str(ip)
        return str(ipaddress.ip_network((int(ip), _IPV6_PREFIX), strict=False))
    return address[:_ORIGIN_CHARS_MAX]
