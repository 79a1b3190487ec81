"""The ids by which messages of acknowledged work are acknowledged: opaque to users, and good for one delivery.

    seat . delivery . offset

The seat's part is random, so that nobody can name what somebody else was given.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from runnel.errors import ForbiddenError
from runnel.protocols.http.consumers.acked import ACKED_MAX
from runnel.protocols.http.consumers.polling_consumers import Seats, Taken, check_rights
from runnel.protocols.http.encoding.problems import FieldFault
from runnel.protocols.http.server.calls import Call

_FORM: Final = re.compile(r"([A-Za-z0-9_-]{1,32})\.([0-9]{1,18})\.([0-9]{1,18})", re.ASCII)
IDS_MAX: Final = ACKED_MAX  # so that a whole request can be said again


class Named:
    """What a caller names by ack ids: by seat, delivery and offset; and those whose seat is no more."""

    def __init__(self) -> None:
        self.by_seat: dict[str, tuple[Taken, dict[int, list[int]]]] = {}
        self.late: list[str] = []
        self.count = 0


def named(call: Call, seats: Seats, subscription: str, ids: Sequence[str], *, verb: str) -> Named:
    """Checked before anything is done with them: a mistake in one, and nothing is done with the others either."""
    if not 1 <= len(ids) <= IDS_MAX:
        raise FieldFault("$.acks", f"{len(ids)} ids; 1 to {IDS_MAX} are taken at a time")
    found = Named()
    for at, ack_id in enumerate(dict.fromkeys(ids)):
        found.count += 1
        parts = _FORM.fullmatch(ack_id)
        if parts is None:
            raise FieldFault(f"$.acks[{at}]", f"{ack_id[:64]!r} is no `ack` of a message")
        seat_id, delivery, offset = parts[1], int(parts[2]), int(parts[3])
        known = found.by_seat.get(seat_id)
        if known is None:
            taken = seats.by_id(seat_id)
            if taken is None:
                found.late.append(ack_id)
                continue
            try:
                _check(call, taken, subscription, at)
            except ForbiddenError as error:
                call.access.record_denial(verb, error)
                raise
            known = found.by_seat[seat_id] = (taken, {})
        known[1].setdefault(delivery, []).append(offset)
    return found


def _check(call: Call, taken: Taken, subscription: str, at: int) -> None:
    if taken.owner is not call.rights:
        raise ForbiddenError(f"$.acks[{at}]: its message was given to somebody with another token")
    if taken.subscription != subscription:
        raise FieldFault(
            f"$.acks[{at}]", f"its message is of another subscription than {subscription!r}"
        )
    check_rights(call, taken)


def ack_id(seat_id: str, delivery: int, offset: int) -> str:
    return f"{seat_id}.{delivery}.{offset}"
