"""What the log has: messages as they became visible, topics, dead letters, and what may be gone of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runnel.config import Until
from runnel.formats.dead_letters import FROM_TAG, OFFSET_TAG, PARTITION_TAG, TOPIC_TAG
from runnel.formats.message import Message
from runnel.topics.names import DEAD_LETTER_PREFIX, TopicPartition
from runnel.topics.policies import Policies
from tests.simulation.history import Violation


class Stock:
    """Kept over all processes of a history."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self.messages: dict[
            TopicPartition, dict[int, Message]
        ] = {}  # those that were seen, by offset
        self.topics: set[str] = set()  # that exist
        self.letters: set[tuple[str, TopicPartition, int]] = set()
        self._purged: dict[str, Mapping[TopicPartition, int]] = {}
        self._purging: set[str] = set()
        self._surely_purged: dict[TopicPartition, int] = {}

    def end(self, key: TopicPartition) -> int:
        return 1 + max(self.messages.get(key, {}), default=0)

    def ends(self, topic: str) -> dict[TopicPartition, int]:
        return {key: self.end(key) for key in self.messages if key[0] == topic}

    def take(self, key: TopicPartition, messages: Sequence[Message]) -> None:
        """They have become visible."""
        self.messages.setdefault(key, {}).update({each.offset: each for each in messages})
        for message in messages:
            self._take_letter(message)

    def _take_letter(self, message: Message) -> None:
        if message.topic.startswith(DEAD_LETTER_PREFIX):
            tags = message.tags
            key = (tags[TOPIC_TAG], int(tags[PARTITION_TAG]))
            offset = int(tags[OFFSET_TAG])
            self.letters.add((tags[FROM_TAG], key, offset))
            original = self.messages.get(key, {}).get(offset)
            if original is None or original.payload != message.payload:
                raise Violation(
                    f"{message.topic}@{message.offset} is {message.payload!r}, not {original}"
                )

    def partitions(self, topic: str) -> int:
        return self._policies.for_topic(topic).partitions

    def hiding(self, topic: str) -> None:
        """It is being purged or deleted: whatever it has may be gone until the answer is there."""
        self._purging.add(topic)

    def is_hiding(self, topic: str) -> bool:
        return topic in self._purging

    def was_hidden(self, topic: str) -> bool:
        """Whether it was purged or deleted: that hides what is being stored, too, which nobody ever sees then."""
        return topic in self._purging or topic in self._purged

    def hidden(self, topic: str) -> None:
        """The answer came, or cannot come any more: messages stored meanwhile may be gone, too."""
        self._purging.discard(topic)
        self._purged[topic] = self.ends(topic)

    def hidden_below(self, key: TopicPartition, floor: int) -> None:
        """The log says so of a topic that was made again."""
        if floor > 1:
            purged = self._purged.get(key[0], {})
            self._purged[key[0]] = {**purged, key: max(floor, purged.get(key, 1))}

    def surely_hidden(self, ends: Mapping[TopicPartition, int]) -> None:
        """The purge was acknowledged: no consumer gets an earlier message."""
        self._surely_purged |= ends

    def is_hidden(self, key: TopicPartition, offset: int) -> bool:
        return offset < self._surely_purged.get(key, 1)

    def purged_below(self, key: TopicPartition) -> int:
        """What was purged, or may have been, lies before this offset."""
        return self.end(key) if self.is_hiding(key[0]) else self._purged.get(key[0], {}).get(key, 1)

    def nobody_answers(self) -> None:
        """The process is over, whatever was being hidden."""
        for topic in list(self._purging):
            self.hidden(topic)

    def may_be_gone(self, key: TopicPartition, offset: int) -> bool:
        """All messages that any group is owed."""
        if key[0] in self._purging or offset < self._purged.get(key[0], {}).get(key, 1):
            return True
        retain = self._policies.for_topic(key[0]).retain
        return retain.age_ns is not None or retain.bytes_max is not None

    def goes_when_acked(self, topic: str) -> bool:
        return self._policies.for_topic(topic).retain.until is Until.ACKED
