"""An observed subscription: its checker, its consumer groups, and what the broker promised its operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnel.group_rules.definition import Definition, Mode
from runnel.topics.names import TopicPartition
from runnel.topics.patterns import Pattern, any_of
from tests.group_rules.checker import Checker
from tests.group_rules.facts import PartitionFacts
from tests.group_rules.history import Rules

if TYPE_CHECKING:
    from tests.broker.consumer_groups.simulation.recording_classes import RecordingConsumerGroup


class Subject:
    """An observed subscription: its checker, its groups, and what the broker confirmed about it."""

    def __init__(self, definition: Definition) -> None:
        self.id = definition.id
        self.name = definition.name
        self.mode = definition.mode
        self.matches = any_of([Pattern(text) for text in definition.patterns])
        options = definition.options
        self.options = options
        self.checker = Checker(
            Rules(
                is_keyed=definition.mode is Mode.KEY_SHARED,
                lease_ns=options.lease_ns,
                deliveries_max=options.deliveries_max,
                retry_delay_ns=options.retry_delay_ns,
                retry_delay_ns_max=options.retry_delay_ns_max,
                backoff=options.backoff,
            )
        )
        self.is_made = False  # somebody was told so
        self.may_be_deleted = False  # somebody asked for it, and has no answer
        self.is_paused = definition.is_paused
        self.pausing: list[bool] = []  # asked for without an answer
        self.members: set[str] = set()  # that were told they are
        self.consumer_groups: dict[str, RecordingConsumerGroup] = {}  # of this process
        # Messages that no group was owed when a group began with a partition, or was moved: they may be gone.
        self.excused: dict[tuple[str, TopicPartition], set[int]] = {}
        # Partitions whose shard went without warning: what was not stored of them may be lost.
        self.inexact: set[tuple[str, TopicPartition]] = set()
        self.left_out: set[tuple[str, TopicPartition]] = set()  # topics deleted that a group knew

    def groups(self) -> list[str]:
        """Those that outlive a process."""
        if self.mode is not Mode.MULTICAST:
            return [""]
        return [name for name in self.checker.groups if not is_unnamed(name)]

    def partition(self, group: str, key: TopicPartition) -> PartitionFacts | None:
        return self.checker.group(group).partitions.get(key)


def names(definition: Definition) -> set[str]:
    return {member.name for member in definition.members}


def is_unnamed(group: str) -> bool:
    return group.startswith("~")
