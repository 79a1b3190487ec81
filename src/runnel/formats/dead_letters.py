"""The tags of a dead letter: a message that somebody gave up, stored in `!dead/…` with what it was and why.

dead.error       why it failed the last time
dead.topic       the topic it was in, or meant for
dead.partition   } its place there, if it had one
dead.offset      }
dead.deliveries  how often it was tried, by a subscription
dead.from        who gave it up: the subscription, or the pipeline
dead.member      which member of it, if it is a multicast
"""

from __future__ import annotations

from typing import Final

ERROR_TAG: Final = "dead.error"
TOPIC_TAG: Final = "dead.topic"
PARTITION_TAG: Final = "dead.partition"
OFFSET_TAG: Final = "dead.offset"
DELIVERIES_TAG: Final = "dead.deliveries"
FROM_TAG: Final = "dead.from"
MEMBER_TAG: Final = "dead.member"
LETTER_TAGS: Final = frozenset(
    {ERROR_TAG, TOPIC_TAG, PARTITION_TAG, OFFSET_TAG, DELIVERIES_TAG, FROM_TAG, MEMBER_TAG}
)
