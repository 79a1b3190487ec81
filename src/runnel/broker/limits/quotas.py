"""The quotas of each token: how many topics, cursors and subscriptions it creates, how fast it publishes and reads.

At a count's limit, one more is refused. Over a rate, the token is slowed down: its publishes wait for room, its fetches
wait, and its subscriptions and consumers are paused. Other tokens do not wait. Each topic, cursor and subscription is
stored with the token that created it, so the counts hold after a restart; deleting it frees its place.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from runnel.broker.limits.rates import Rate
from runnel.broker.monitoring.events import EventKind, Events
from runnel.broker.monitoring.metrics import BrokerCounters
from runnel.config import SecuritySettings, format_size
from runnel.errors import BusyError, QuotaExceededError
from runnel.platform.clock import Clock
from runnel.platform.tasks import OwnedTasks
from runnel.security.rights import Rights, TokenQuotas

_SECOND_NS: Final = 1_000_000_000
# At most one event in this time for each quota of a token, however often it is reached.
_EVENT_INTERVAL_NS: Final = 60 * _SECOND_NS
# How many more readers may wait before closed readers are removed from the queue.
_SLOWED_SLACK: Final = 1000


class Quota(enum.StrEnum):
    """The names of a token's own quotas. The settings for all tokens are `security.token_…`."""

    TOPICS = "topics_max"
    CURSORS = "cursors_max"
    SUBSCRIPTIONS = "subscriptions_max"
    BYTES_IN = "bytes_in_per_s"
    MESSAGES_IN = "messages_in_per_s"
    BYTES_OUT = "bytes_out_per_s"
    MESSAGES_OUT = "messages_out_per_s"


_NOUNS: Final[Mapping[Quota, str]] = {
    Quota.TOPICS: "topic",
    Quota.CURSORS: "cursor",
    Quota.SUBSCRIPTIONS: "subscription",
}
_IN: Final = (Quota.BYTES_IN, Quota.MESSAGES_IN)
_OUT: Final = (Quota.BYTES_OUT, Quota.MESSAGES_OUT)


class SlowedReader(Protocol):
    """A subscription or consumer that is paused while its token is over a rate."""

    @property
    def is_closed(self) -> bool: ...
    def slow(self) -> None: ...
    def unslow(self) -> None: ...


class Traffic:
    """The rates of a token in one direction, in or out."""

    __slots__ = ("bytes", "messages")

    def __init__(self, bytes_per_s: int, messages_per_s: int) -> None:
        """0: no limit."""
        self.bytes: Final = Rate(bytes_per_s) if bytes_per_s else None
        self.messages: Final = Rate(messages_per_s) if messages_per_s else None

    def charge(self, messages: int, size: int, now_ns: int) -> None:
        if self.bytes is not None:
            self.bytes.charge(size, now_ns)
        if self.messages is not None:
            self.messages.charge(messages, now_ns)

    def wait_ns(self, now_ns: int) -> int:
        by_bytes = 0 if self.bytes is None else self.bytes.wait_ns(now_ns)
        by_messages = 0 if self.messages is None else self.messages.wait_ns(now_ns)
        return max(by_bytes, by_messages)

    def is_over_bytes(self, now_ns: int) -> bool:
        """Whether the rate of bytes, not that of messages, makes the token wait longest."""
        return self.bytes is not None and self.bytes.wait_ns(now_ns) == self.wait_ns(now_ns)


class Account:
    """One token's quotas and what it has used. The log takes it as the creator of topics."""

    def __init__(self, quotas: Quotas, name: str, own: TokenQuotas) -> None:
        self.name: Final = name
        # None: no rate, so that publishing costs no more than a check of this.
        self.incoming: Traffic | None = None
        self.outgoing: Traffic | None = None
        self._quotas = quotas
        self._own = own
        self._limits: dict[Quota, int] = {}
        self._reported_ns: dict[Quota, int] = {}
        self._in_turn = asyncio.Lock()  # first come, first served
        self._out_turn = asyncio.Lock()
        self._slowed: deque[SlowedReader] = deque()
        self._slowed_max = _SLOWED_SLACK
        self._releasing = False
        self.use()

    @property
    def own(self) -> TokenQuotas:
        return self._own

    def use(self, own: TokenQuotas | None = None) -> None:
        """Apply the current quotas of the settings, and the token's own if they are given."""
        if own is not None:
            self._own = own
        before, self._limits = self._limits, {}
        for quota in Quota:
            given: int | None = getattr(self._own, quota)
            self._limits[quota] = self._quotas.default(quota) if given is None else given
        if any(before.get(quota) != self._limits[quota] for quota in _IN):
            self.incoming = self._traffic(*_IN)
        if any(before.get(quota) != self._limits[quota] for quota in _OUT):
            self.outgoing = self._traffic(*_OUT)

    def _traffic(self, bytes_per_s: Quota, messages_per_s: Quota) -> Traffic | None:
        rates = (self._limits[bytes_per_s], self._limits[messages_per_s])
        return Traffic(*rates) if any(rates) else None

    # --- Counts ---

    def check_topic(self, name: str) -> None:
        self._check_count(Quota.TOPICS, name)

    def check_cursor(self, name: str, under_way: int) -> None:
        """`under_way`: cursors of this token that are being created and not counted yet."""
        self._check_count(Quota.CURSORS, name, under_way)

    def check_subscription(self, name: str) -> None:
        self._check_count(Quota.SUBSCRIPTIONS, name)

    def _check_count(self, quota: Quota, name: str, under_way: int = 0) -> None:
        limit = self._limits[quota]
        if not limit or self._quotas.count(quota, self.name) + under_way < limit:
            return
        self._quotas.counters.quota_refusals += 1
        self._report(quota, "refused")
        noun = _NOUNS[quota]
        raise QuotaExceededError(
            f"{noun} {name!r} would be one more than the {limit:,} {noun}s that token {self.name!r} may "
            f"make: {self._setting_text(quota)}; delete some of them, or have it raised"
        )

    # --- Publishing ---

    def check_in(self) -> None:
        """Check the rate. BusyError: await `wait_in`, and try again."""
        traffic = self.incoming
        if traffic is None:
            return
        now_ns = self._quotas.clock.monotonic_ns()
        if traffic.wait_ns(now_ns):
            quota = _IN[0 if traffic.is_over_bytes(now_ns) else 1]
            self._count_wait(quota)
            raise BusyError(
                f"token {self.name!r} publishes faster than {self._setting_text(quota)}"
            )

    def charge_in(self, messages: int, size: int) -> None:
        if self.incoming is not None:
            self.incoming.charge(messages, size, self._quotas.clock.monotonic_ns())

    async def wait_in(self) -> None:
        """Wait until the token may publish."""
        if self.incoming is not None:
            async with self._in_turn:
                await self._wait(lambda: self.incoming)

    @property
    def is_slowed_in(self) -> bool:
        traffic = self.incoming
        return traffic is not None and traffic.wait_ns(self._quotas.clock.monotonic_ns()) > 0

    # --- Reading ---

    @property
    def is_slowed_out(self) -> bool:
        """Whether a fetch has to wait, for the rate or behind other fetches."""
        return self._out_turn.locked() or self._out_wait_ns() > 0

    async def wait_out(self) -> None:
        """Wait until the token may fetch."""
        if self.outgoing is not None:
            if self._out_wait_ns():
                self._count_out_wait()
            async with self._out_turn:
                await self._wait(lambda: self.outgoing)

    def page_max(self, messages_max: int, bytes_max: int) -> tuple[int, int]:
        """The page limits of a fetch: a single page is at most a second's worth of the rate."""
        traffic = self.outgoing
        if traffic is not None:
            if traffic.bytes is not None:
                bytes_max = min(bytes_max, traffic.bytes.per_s)
            if traffic.messages is not None:
                messages_max = min(messages_max or traffic.messages.per_s, traffic.messages.per_s)
        return messages_max, bytes_max

    def charge_out(self, messages: int, size: int) -> None:
        if self.outgoing is not None:
            self.outgoing.charge(messages, size, self._quotas.clock.monotonic_ns())

    def delivered(self, reader: SlowedReader, messages: int, size: int) -> None:
        """Charge a delivery to a reader, and pause the reader if its token is over its rate."""
        if self.outgoing is not None:
            self.charge_out(messages, size)
            self.slow_if_over(reader)

    def slow_if_over(self, reader: SlowedReader) -> None:
        if not self._out_wait_ns():
            return
        reader.slow()
        self._slowed.append(reader)
        if len(self._slowed) > self._slowed_max:
            self._slowed = deque(each for each in self._slowed if not each.is_closed)
            self._slowed_max = len(self._slowed) + _SLOWED_SLACK
        if not self._releasing:
            self._count_out_wait()
            self._releasing = True
            self._quotas.start(self._release())

    async def _release(self) -> None:
        """Resume readers one after the other, as the rate allows."""
        try:
            while self._slowed:
                await self._wait(lambda: self.outgoing)
                self._slowed.popleft().unslow()  # which may append it to the queue again
                await asyncio.sleep(0)
        finally:
            self._releasing = False

    def _out_wait_ns(self) -> int:
        traffic = self.outgoing
        return 0 if traffic is None else traffic.wait_ns(self._quotas.clock.monotonic_ns())

    async def _wait(self, traffic: Callable[[], Traffic | None]) -> None:
        """Wait for a rate. It is looked up again after each sleep: the quotas may have changed meanwhile."""
        clock = self._quotas.clock
        while (current := traffic()) is not None:
            wait_ns = current.wait_ns(clock.monotonic_ns())
            if not wait_ns:
                return
            await clock.sleep(min(wait_ns, _SECOND_NS) / _SECOND_NS)

    # --- Reporting ---

    def _count_out_wait(self) -> None:
        traffic = self.outgoing
        assert traffic is not None
        is_bytes = traffic.is_over_bytes(self._quotas.clock.monotonic_ns())
        self._count_wait(_OUT[0 if is_bytes else 1])

    def _count_wait(self, quota: Quota) -> None:
        self._quotas.counters.quota_waits += 1
        self._report(quota, "slowed")

    def _report(self, quota: Quota, effect: str) -> None:
        now_ns = self._quotas.clock.monotonic_ns()
        reported_ns = self._reported_ns.get(quota)
        if reported_ns is None or now_ns - reported_ns >= _EVENT_INTERVAL_NS:
            self._reported_ns[quota] = now_ns
            self._quotas.events.emit(
                EventKind.QUOTA_REACHED,
                self.name,
                quota=quota.value,
                limit=self._limits[quota],
                effect=effect,
            )

    def _setting_text(self, quota: Quota) -> str:
        limit = self._limits[quota]
        value = format_size(limit) if quota in (Quota.BYTES_IN, Quota.BYTES_OUT) else str(limit)
        if getattr(self._own, quota) is None:
            return f"security.token_{quota} = {value}"
        return f"its quota {quota} = {value}"


class Quotas:
    """The accounts of all tokens that have been used, and the quotas of tokens without their own."""

    def __init__(
        self, settings: SecuritySettings, clock: Clock, counters: BrokerCounters, events: Events
    ) -> None:
        self.clock: Final = clock
        self.counters: Final = counters
        self.events: Final = events
        self.counts: Mapping[Quota, Callable[[str], int]] = {}
        """For each count quota, how many things a token has created, by its name. Set when the logs are open."""
        self._settings = settings
        self._accounts: dict[str, Account] = {}
        self._tasks = OwnedTasks("the quotas")

    def use(self, settings: SecuritySettings) -> None:
        """Apply other quotas from now on, to connected clients as well."""
        self._settings = settings
        for account in self._accounts.values():
            account.use()

    def of(self, rights: Rights) -> Account:
        """The account of a token; all its connections share it."""
        account = self._accounts.get(rights.name)
        if account is None:
            account = self._accounts[rights.name] = Account(self, rights.name, rights.quotas)
        elif account.own != rights.quotas:
            account.use(rights.quotas)
        return account

    def default(self, quota: Quota) -> int:
        limit: int = getattr(self._settings, f"token_{quota}")
        return limit

    def count(self, quota: Quota, token: str) -> int:
        return self.counts[quota](token)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.start(work)

    async def close(self) -> None:
        """Stop releasing slowed readers: the broker is closing."""
        self._tasks.cancel()
        await self._tasks.wait()
