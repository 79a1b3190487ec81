"""Between the messages of runnel.proto and what the verbs of `Bus` take and return."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from runnel.client.places import StartAt, start_of
from runnel.client.results import Gap
from runnel.errors import ClientFault, RunnelError, from_details
from runnel.formats import block, wire
from runnel.formats.batch import Batch
from runnel.formats.message import NO_TAGS, Message
from runnel.formats.wire import CursorPlace, CursorState, Owner, PartitionState, TopicState
from runnel.formats.work_heads import MemberState, PartitionWork, SubscriptionState, WorkOptions
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.conformance.clients.publishing import Outgoing

_OPTION_FIELDS = WorkOptions.__struct_fields__


def enum_of(enum: Any, what: str, word: str | None) -> Any:
    """`stored` of Level is LEVEL_STORED. What is no word of it has no place on the wire."""
    if word is None:
        return 0
    prefix = f"{what.upper()}_"
    words = [name.removeprefix(prefix).lower() for name in enum.keys()][1:]  # noqa: SIM118
    if word not in words:
        raise ClientFault(f"{what} {word!r} is unknown: {', '.join(words)}")
    return enum.Value(prefix + word.upper())


def word_of(enum: Any, what: str, value: int) -> str:
    name: str = enum.Name(value)
    return name.removeprefix(f"{what.upper()}_").lower()


def optional(proto: Any, field: str) -> Any:
    """A field's value, or None where it is not set."""
    return getattr(proto, field) if proto.HasField(field) else None


def pb_message(sent: Outgoing) -> pb.Message:
    message = sent.message
    return pb.Message(
        topic=message.topic,
        payload=message.payload,
        key=message.key,
        partition_key=message.partition_key,
        partition=sent.partition,
        tags=dict(message.tags),
        event_time_ns=message.event_time_ns,
        transmit_time_ns=message.transmit_time_ns,
        uid=message.uid,
    )


def message_of(told: pb.Message) -> Message:
    return Message(
        told.topic,
        told.payload,
        key=optional(told, "key"),
        tags=dict(told.tags) or NO_TAGS,
        event_time_ns=told.event_time_ns,
        transmit_time_ns=told.transmit_time_ns,
        receive_time_ns=told.receive_time_ns,
        partition=told.partition,
        offset=told.offset,
        uid=optional(told, "uid"),
        partition_key=optional(told, "partition_key"),
    )


def batches_of(blocks: Sequence[bytes]) -> list[Batch]:
    """Each block is whole, and nothing is behind it."""
    batches = []
    for data in blocks:
        envelope, body, length = block.unpack(memoryview(data), 0)
        assert length == len(data)
        batches.append(Batch(envelope, body))
    return batches


def gap_of(told: pb.Gap) -> Gap:
    return Gap(
        told.reason,
        told.missed,
        told.topic,
        told.partition,
        told.first_offset,
        told.next_offset,
        told.text,
    )


def error_of(told: pb.Error) -> RunnelError:
    return from_details(told.code, told.text, json.loads(told.details or "{}"))


def pb_start(start: StartAt | None, patterns: Sequence[str]) -> pb.Start | None:
    if start is None:
        return None
    chosen = start_of(start, patterns)
    return pb.Start(
        kind=f"KIND_{chosen.kind.upper()}",
        partitions=[
            pb.PartitionPlace(topic=place.topic, partition=place.partition, offset=place.offset)
            for place in chosen.partitions
        ],
        time_ns=chosen.time_ns,
    )


def pb_options(options: WorkOptions | None) -> pb.WorkOptions | None:
    if options is None:
        return None
    told = {field: getattr(options, field) for field in _OPTION_FIELDS}
    return pb.WorkOptions(**told)


def pb_place(place: CursorPlace) -> pb.CursorPlace:
    return pb.CursorPlace(
        topic=place.topic,
        partition=place.partition,
        offset=place.offset,
        journal=place.journal,
        shard=place.shard,
        epoch=place.epoch,
        entry=place.entry,
        row=place.row,
        patterns=place.patterns,
    )


def cursor_of(told: pb.Cursor) -> CursorState:
    places = [
        CursorPlace(
            optional(place, "topic"),
            place.partition,
            place.offset,
            optional(place, "journal"),
            place.shard,
            place.epoch,
            place.entry,
            place.row,
            list(place.patterns),
            place.lag,
        )
        for place in told.places
    ]
    return CursorState(told.name, places, told.updated_ns)


def topic_of(told: pb.Topic) -> TopicState:
    return TopicState(
        told.name,
        told.keep,
        told.journal,
        told.partition_count,
        told.messages,
        told.subscribers,
        optional(told, "rule"),
        told.last_value,
        told.retain,
        [
            PartitionState(each.first_offset, each.next_offset, owner_of(each.owner))
            for each in told.partitions
        ],
    )


def owner_of(told: pb.Owner) -> Owner:
    return Owner(told.journal, told.shard, told.epoch, told.address)


def shard_of(told: pb.Shard) -> wire.ShardState:
    return wire.ShardState(
        told.journal,
        told.shard,
        told.epoch,
        told.first_entry,
        told.next_entry,
        told.time_entry,
        told.address,
    )


def subscription_of(told: pb.Subscription) -> SubscriptionState:
    return SubscriptionState(
        told.name,
        word_of(pb.Mode, "mode", told.mode),
        list(told.patterns),
        told.is_paused,
        told.made_ns,
        WorkOptions(*(optional(told.options, field) for field in _OPTION_FIELDS)),
        [
            MemberState(*(getattr(each, field) for field in MemberState.__struct_fields__))
            for each in told.members
        ],
        told.redelivered,
        told.dead,
        [
            PartitionWork(*(getattr(each, field) for field in PartitionWork.__struct_fields__))
            for each in told.partitions
        ],
    )
