"""Warns about patterns in the syntax of other brokers that match no topic here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from runnel.client.connection.link import Link
from runnel.client.connection.timers import Deadline
from runnel.errors import RunnelError
from runnel.formats import wire
from runnel.topics.hints import glob_hint, glob_meant

# Without a handler of the program's own, warnings go to standard error.
logger = logging.getLogger("runnel.client")

_HINTS_MAX: Final = 100  # of one bus


class HintedLinks(Protocol):
    """The link that is asked, and the patterns that were checked: a client's `Router`."""

    @property
    def home(self) -> Link: ...
    @property
    def hinted(self) -> set[str]: ...


async def warn_of_habits(router: HintedLinks, patterns: Sequence[str], deadline: Deadline) -> None:
    """Log a warning for each pattern of MQTT or NATS that no topic matches, once for each bus."""
    for pattern in patterns:
        glob = glob_meant(pattern)
        if glob is None or pattern in router.hinted or len(router.hinted) >= _HINTS_MAX:
            continue
        router.hinted.add(pattern)
        try:
            answer, _ = await router.home.ask(
                wire.TopicList,
                lambda number, pattern=pattern: wire.Topics(number, pattern, "", 1),  # type: ignore[misc]
                deadline=deadline,
                what=f"looking for topics {pattern}",
            )
        except RunnelError:
            return  # the subscription works without a hint
        if answer.is_complete and not answer.topics:
            logger.warning("warning: pattern %r: %s", pattern, glob_hint(pattern, glob))
