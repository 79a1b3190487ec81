"""The bus's verbs for topics, cursors and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runnel.client.arguments import check_patterns
from runnel.client.consumer import OffsetMap, partition_places
from runnel.client.requests import PER_PAGE, BusRequests
from runnel.errors import UnknownTopicError
from runnel.formats import wire
from runnel.formats.wire import CursorPlace, CursorState, Route, TopicState


class TopicVerbs(BusRequests):
    """The part of `Bus` that is about topics, cursors and checkpoints."""

    # --- Topics ---

    async def topics(self, pattern: str = "*") -> list[TopicState]:
        """All topics that match, in order of their names."""
        check_patterns((pattern,))
        found: list[TopicState] = []
        while True:
            after = found[-1].name if found else ""
            answer, _ = await self._ask(
                wire.TopicList,
                lambda number, after=after: wire.Topics(  # type: ignore[misc]
                    number, pattern, after, PER_PAGE
                ),
                f"listing topics {pattern}",
            )
            found += answer.topics
            if answer.is_complete or not answer.topics:
                return found

    async def topic(self, name: str) -> TopicState:
        """One topic, with its partitions."""
        answer, _ = await self._ask(
            wire.TopicList, lambda number: wire.DescribeTopic(number, name), f"describing {name}"
        )
        if not answer.topics:
            raise UnknownTopicError(f"there is no topic {name!r}")
        return answer.topics[0]

    async def routes(self, *topics: str) -> dict[str, Route]:
        """The partitions, journal and shards of these topics. The broker is asked once for each topic."""
        await self._router.resolve(topics, self._deadline())
        return {topic: self._router.routes[topic] for topic in topics}

    async def delete_topic(self, name: str) -> None:
        """Delete a topic and its messages. If it is made again, its offsets continue after the last one."""
        self._router.forget([name])
        await self._do(lambda number: wire.DeleteTopic(number, name), f"deleting {name}")

    async def purge_topic(self, name: str) -> None:
        """Remove all messages, and keep the topic."""
        await self._do(lambda number: wire.PurgeTopic(number, name), f"purging {name}")

    # --- Copies ---

    async def checkpoint(self) -> tuple[str, str]:
        """Make a copy of all files of the broker as of one moment, for `runnel backup`; returns its path and its id.

        The path is on the broker's machine. The broker removes the copy when this client's connection ends.
        """
        answer, _ = await self._ask(
            wire.Checkpoint, wire.MakeCheckpoint, "making a checkpoint", is_repeatable=False
        )
        return answer.path, answer.checkpoint

    # --- Cursors ---

    async def cursors(self) -> list[CursorState]:
        """All named cursors, with their lag."""
        found: list[CursorState] = []
        while True:
            after = found[-1].name if found else ""
            answer, _ = await self._ask(
                wire.CursorListHead,
                lambda number, after=after: wire.Cursors(  # type: ignore[misc]
                    number, None, after, PER_PAGE
                ),
                "listing cursors",
            )
            found += answer.cursors
            if answer.is_complete or not answer.cursors:
                return found

    async def cursor(self, name: str) -> CursorState | None:
        """One named cursor, with its lag; None if it does not exist."""
        answer, _ = await self._ask(
            wire.CursorListHead,
            lambda number: wire.Cursors(number, name),
            f"asking for cursor {name}",
        )
        return answer.cursors[0] if answer.cursors else None

    async def set_cursor(self, name: str, places: OffsetMap | Sequence[CursorPlace]) -> None:
        """Store a reader's position: the next offset of each topic, or (topic, partition)."""
        if isinstance(places, Mapping):
            places = [
                CursorPlace(place.topic, place.partition, place.offset)
                for place in partition_places(places)
            ]
        chosen = tuple(places)
        await self._ask(
            wire.Done,
            lambda number: wire.SetCursor(number, name, chosen),
            f"setting cursor {name}",
        )

    async def remove_cursor(self, name: str) -> None:
        """Remove a cursor. Retention may then remove messages that only this cursor held."""
        await self._do(lambda number: wire.RemoveCursor(number, name), f"removing cursor {name}")
