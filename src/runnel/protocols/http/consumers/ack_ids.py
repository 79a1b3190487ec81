"""The ids by which clients acknowledge messages: opaque to users, and valid for one delivery.

    consumer . delivery . offset

The consumer's part is random, so that no client can name messages that another client was given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from runnel.errors import ForbiddenError
from runnel.protocols.http.consumers.polling_consumers import (
    Caller,
    OwnedConsumer,
    PollingConsumers,
)
from runnel.protocols.http.consumers.recent_acks import ACKED_MAX
from runnel.protocols.http.encoding.problems import FieldFault

_FORM: Final = re.compile(r"([A-Za-z0-9_-]{1,32})\.([0-9]{1,18})\.([0-9]{1,18})", re.ASCII)
IDS_MAX: Final = ACKED_MAX  # so that a whole request can be repeated


class NamedMessages:
    """The messages that a request names by ack ids, by consumer, delivery and offset."""

    def __init__(self) -> None:
        self.by_consumer: dict[str, tuple[OwnedConsumer, dict[int, list[int]]]] = {}
        self.late: list[str] = []  # ids whose consumer has ended
        self.count = 0


def named_messages(
    caller: Caller,
    consumers: PollingConsumers,
    subscription: str,
    ids: Sequence[str],
    *,
    verb: str,
) -> NamedMessages:
    """Check all ids before anything is done: a mistake in one refuses the whole request."""
    if not 1 <= len(ids) <= IDS_MAX:
        raise FieldFault("$.acks", f"{len(ids)} ids; 1 to {IDS_MAX} are taken at a time")
    found = NamedMessages()
    for at, ack_id in enumerate(dict.fromkeys(ids)):
        found.count += 1
        parts = _FORM.fullmatch(ack_id)
        if parts is None:
            raise FieldFault(f"$.acks[{at}]", f"{ack_id[:64]!r} is no `ack` of a message")
        consumer_id, delivery, offset = parts[1], int(parts[2]), int(parts[3])
        known = found.by_consumer.get(consumer_id)
        if known is None:
            owned = consumers.by_id(consumer_id)
            if owned is None:
                found.late.append(ack_id)
                continue
            try:
                _check(caller, owned, subscription, at)
            except ForbiddenError as error:
                caller.access.record_denial(verb, error)
                raise
            known = found.by_consumer[consumer_id] = (owned, {})
        known[1].setdefault(delivery, []).append(offset)
    return found


def _check(caller: Caller, owned: OwnedConsumer, subscription: str, at: int) -> None:
    if owned.owner is not caller.rights:
        raise ForbiddenError(f"$.acks[{at}]: its message was given to a client with another token")
    if owned.subscription != subscription:
        raise FieldFault(
            f"$.acks[{at}]", f"its message is of another subscription than {subscription!r}"
        )
    owned.check_rights(caller)


def ack_id(consumer_id: str, delivery: int, offset: int) -> str:
    return f"{consumer_id}.{delivery}.{offset}"
