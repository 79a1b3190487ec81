"""The tags of a dead letter: a message that was given up, and is stored in `!dead/…` with its origin and the reason.

dead.error       why it failed the last time
dead.error_type  the class of the exception that it failed with, if the reason has a traceback
dead.traceback   the last lines of that traceback
dead.topic       the topic it was in, or meant for
dead.partition   } its position there, if it had one
dead.offset      }
dead.deliveries  how often the subscription delivered it
dead.from        the subscription or pipeline that gave it up
dead.member      the member of that subscription, if it is a multicast

A reason with a traceback is text as Python prints it: what happened, a line that says `Traceback (most recent call
last):`, its frames, and the exception's class, perhaps with its text. Clients in other languages may write the same.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

ERROR_TAG: Final = "dead.error"
ERROR_TYPE_TAG: Final = "dead.error_type"
TRACEBACK_TAG: Final = "dead.traceback"
TOPIC_TAG: Final = "dead.topic"
PARTITION_TAG: Final = "dead.partition"
OFFSET_TAG: Final = "dead.offset"
DELIVERIES_TAG: Final = "dead.deliveries"
FROM_TAG: Final = "dead.from"
MEMBER_TAG: Final = "dead.member"
LETTER_TAGS: Final = frozenset(
    {
        ERROR_TAG,
        ERROR_TYPE_TAG,
        TRACEBACK_TAG,
        TOPIC_TAG,
        PARTITION_TAG,
        OFFSET_TAG,
        DELIVERIES_TAG,
        FROM_TAG,
        MEMBER_TAG,
    }
)

TRACEBACK_MARK: Final = "Traceback (most recent call last):"

_CLASS_NAME: Final = re.compile(r"[^\W\d][\w.]*")


class Reason(NamedTuple):
    """Why a message failed. Without a traceback there is only the error."""

    error: str
    error_type: str = ""
    traceback: str = ""


def parse_reason(text: str) -> Reason:
    """Split the reason of a nack into its parts."""
    error, mark, rest = text.partition(TRACEBACK_MARK)
    lines = rest.strip("\n").splitlines()
    if not mark or not lines:
        return Reason(text)
    found = _CLASS_NAME.match(lines[-1])
    error_type = "" if found is None else found.group()
    return Reason(error.strip() or lines[-1], error_type, "\n".join(lines))
