"""All polling consumers of an HTTP listener: finds or makes the consumer of a request, and ends idle ones.

A consumer belongs to one token (`Rights`): requests with another token cannot use it, nor acknowledge its messages.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final, NamedTuple, Protocol
from urllib.parse import quote

from runnel.broker.access import Access
from runnel.broker.broker import Broker
from runnel.errors import LimitExceededError, RunnelError, UnknownSubscriptionError
from runnel.formats.work_heads import Consume
from runnel.group_rules.definition import Mode
from runnel.platform.tasks import OwnedTasks
from runnel.protocols.http.consumers.polling_consumer import PollingConsumer
from runnel.security.authenticator import Authenticator
from runnel.security.rights import Right, Rights

_IDLE_NS_MAX: Final = 60 * 1_000_000_000
_SWEEP_SECONDS: Final = 1.0
_ID_BYTES: Final = 9
# One token may have a quarter of all consumers, so that some are left for others.
_TOKENS_SHARE: Final = 4


class Caller(Protocol):
    """The request that uses a consumer."""

    @property
    def access(self) -> Access: ...
    @property
    def rights(self) -> Rights | None: ...
    @property
    def peer(self) -> str: ...
    def check_admitted(self) -> None: ...


class OwnedConsumer(NamedTuple):
    """A polling consumer, its subscription, and the token that it belongs to."""

    polling: PollingConsumer
    subscription: str
    member: str
    name: str  # chosen by the client, or generated
    owner: Rights | None
    """A token that is changed has new rights. None: the broker asks for no tokens."""

    def check_rights(self, caller: Caller) -> None:
        """The caller's rights may have changed since the consumer was made."""
        if caller.rights is not None:
            caller.rights.check_patterns(Right.CONSUME, self.polling.consumer.definition.patterns)


class PollingConsumers:
    """The consumers by subscription, member, name and token, and by the id that their ack ids contain."""

    def __init__(self, broker: Broker, authenticator: Authenticator, consumers_max: int) -> None:
        self._broker = broker
        self._authenticator = authenticator
        self._consumers_max = consumers_max
        self._by_key: dict[tuple[str, str, str, Rights | None], OwnedConsumer] = {}
        self._by_id: dict[str, OwnedConsumer] = {}
        # In shared mode it does not matter which consumer takes a message: all requests of a token that name no
        # consumer use one together.
        self._shared: dict[tuple[str, Rights | None], OwnedConsumer] = {}
        self._joining = asyncio.Lock()
        self._is_closing = False
        self._tasks = OwnedTasks("the polling consumers")
        self._sweeping: asyncio.Task[None] | None = None
        broker.metrics.add_limit("http.consumers_max", consumers_max, lambda: len(self._by_id))
        authenticator.on_token_ended.append(self._on_token_ended)

    def __len__(self) -> int:
        return len(self._by_id)

    def by_id(self, consumer_id: str) -> OwnedConsumer | None:
        return self._by_id.get(consumer_id)

    async def find(
        self, caller: Caller, subscription: str, member: str, name: str
    ) -> OwnedConsumer:
        """The caller's consumer; made if it does not exist. Without a name it gets a generated one."""
        known = self._known(caller, subscription, member, name)
        if known is None:
            async with self._joining:
                known = self._known(caller, subscription, member, name)
                if known is None:
                    known = await self._join(caller, subscription, member, name)
        known.check_rights(caller)
        return known

    def _known(
        self, caller: Caller, subscription: str, member: str, name: str
    ) -> OwnedConsumer | None:
        if not name:
            return None if member else self._shared.get((subscription, caller.rights))
        return self._by_key.get((subscription, member, name, caller.rights))

    def named(self, caller: Caller, subscription: str, name: str) -> list[OwnedConsumer]:
        """The caller's consumers of this name, for any member."""
        return [
            each
            for each in self._by_id.values()
            if each.owner is caller.rights
            and (each.subscription, each.name) == (subscription, name)
        ]

    async def _join(
        self, caller: Caller, subscription: str, member: str, name: str
    ) -> OwnedConsumer:
        self._make_room(caller.rights)
        consumer_id = secrets.token_urlsafe(_ID_BYTES)
        chosen = name or f"http-{consumer_id}"
        polling = PollingConsumer(
            consumer_id,
            next(self._broker.connection_ids),
            f"{caller.peer} {chosen}",
            self._broker.clock,
            lambda: self._forget(owned),
        )
        owned = OwnedConsumer(polling, subscription, member, chosen, caller.rights)
        request = Consume(0, 1, subscription, window_messages=0, window_bytes=0, member=member)
        try:
            polling.open(await caller.access.consume_polling(1, polling, request))
        except UnknownSubscriptionError:
            # The native protocol makes the subscription when a request names its topics; REST has a resource for it.
            raise UnknownSubscriptionError(
                f"subscription {subscription!r} does not exist; "
                f"PUT /v1/subscriptions/{quote(subscription, safe='')} makes it"
            ) from None
        try:
            caller.check_admitted()  # `_on_token_ended` did not know this consumer yet
        except RunnelError:
            polling.close()
            raise
        self._by_key[subscription, member, chosen, caller.rights] = owned
        self._by_id[consumer_id] = owned
        if not name and polling.consumer.definition.mode is Mode.SHARED:
            self._shared[subscription, caller.rights] = owned
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = self._tasks.start(self._sweep())
        return owned

    def release(self, polling: PollingConsumer) -> None:
        """A request is over. While the listener closes, a consumer ends with its last request."""
        if self._is_closing and polling.is_free:
            polling.close()

    def _make_room(self, owner: Rights | None) -> None:
        """If there are too many consumers, end the one that has been idle for longest, the caller's own first."""
        own = [each for each in self._by_id.values() if each.owner is owner]
        own_max = (
            self._consumers_max if owner is None else max(1, self._consumers_max // _TOKENS_SHARE)
        )
        if len(own) < own_max and len(self._by_id) < self._consumers_max:
            return
        idle = [each.polling for each in own if each.polling.is_free]
        if not idle and len(own) < own_max:
            idle = [each.polling for each in self._by_id.values() if each.polling.is_free]
        if not idle:
            raise LimitExceededError(
                f"http.consumers_max = {self._consumers_max}, of one token {own_max}: so many consumers have messages "
                "leased, or wait for some; no more are allowed"
            )
        min(idle, key=lambda polling: polling.used_ns).close()

    def _on_token_ended(self, owner: Rights) -> None:
        """Messages leased with this token go to other consumers, and do not count as failed."""
        for each in [each for each in self._by_id.values() if each.owner is owner]:
            each.polling.close()

    def _forget(self, owned: OwnedConsumer) -> None:
        self._by_id.pop(owned.polling.id, None)
        key = (owned.subscription, owned.member, owned.name, owned.owner)
        if self._by_key.get(key) is owned:
            del self._by_key[key]
        if self._shared.get((owned.subscription, owned.owner)) is owned:
            del self._shared[owned.subscription, owned.owner]

    # --- Idle consumers ---

    async def _sweep(self) -> None:
        """End idle consumers, as long as there are any consumers."""
        while self._by_id:
            await self._broker.clock.sleep(_SWEEP_SECONDS)
            self._end_idle()

    def _end_idle(self) -> None:
        now_ns = self._broker.clock.monotonic_ns()
        for each in list(self._by_id.values()):
            polling = each.polling
            polling.forget_acked()
            is_idle = self._is_closing or now_ns - polling.used_ns >= _IDLE_NS_MAX
            if is_idle and not polling.is_closed and polling.is_free:
                polling.close()

    # --- Closing ---

    def begin_closing(self) -> None:
        """The listener drains: end the consumers that no client works with; others end with their last request."""
        self._is_closing = True
        self._end_idle()

    async def close(self) -> None:
        """End all consumers: after the listener has closed, no client can acknowledge their messages."""
        self._is_closing = True
        for each in list(self._by_id.values()):
            each.polling.close()
        if self._on_token_ended in self._authenticator.on_token_ended:
            self._authenticator.on_token_ended.remove(self._on_token_ended)
        self._tasks.cancel()
        await self._tasks.wait()
