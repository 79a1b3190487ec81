"""Between the JSON of the HTTP door and what the verbs of `Bus` take and return."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from runnel.client.places import StartAt, start_of
from runnel.client.results import Gap, Receipt
from runnel.formats.message import NO_TAGS, Message
from runnel.formats.wire import CursorPlace, CursorState, Owner, PartitionState, TopicState
from runnel.formats.work_heads import MemberState, PartitionWork, SubscriptionState, WorkOptions
from tests.conformance.clients.publishing import Outgoing

_OPTION_FIELDS = WorkOptions.__struct_fields__


def message_in(sent: Outgoing) -> dict[str, Any]:
    """A message to publish."""
    message = sent.message
    told: dict[str, Any] = {
        "event_time": message.event_time_ns,
        "transmit_time": message.transmit_time_ns,
    }
    told |= _either("text", "base64", message.payload)
    told |= _either("key", "key_base64", message.key)
    told |= _either("partition_key", "partition_key_base64", message.partition_key)
    if message.tags:
        told["tags"] = dict(message.tags)
    if message.uid is not None:
        told["uid"] = base64.b64encode(message.uid).decode()
    return told


def _either(text: str, encoded: str, value: bytes | None) -> dict[str, str]:
    if value is None:
        return {}
    try:
        return {text: value.decode()}
    except UnicodeDecodeError:
        return {encoded: base64.b64encode(value).decode()}


def _bytes(told: dict[str, Any], text: str, encoded: str) -> bytes | None:
    if encoded in told:
        return base64.b64decode(told[encoded], validate=True)
    value = told.get(text)
    return None if value is None else value.encode()


def message_of(told: dict[str, Any]) -> Message:
    payload = _bytes(told, "text", "base64")
    assert payload is not None, told
    assert told["size"] == len(payload), told
    uid = told.get("uid")
    return Message(
        told["topic"],
        payload,
        key=_bytes(told, "key", "key_base64"),
        tags=told.get("tags") or NO_TAGS,
        event_time_ns=told.get("event_time_ns", 0),
        transmit_time_ns=told.get("transmit_time_ns", 0),
        receive_time_ns=told["receive_time_ns"],
        partition=told["partition"],
        offset=told["offset"],
        uid=None if uid is None else base64.b64decode(uid),
        partition_key=_bytes(told, "partition_key", "partition_key_base64"),
    )


def receipt_of(told: dict[str, Any]) -> Receipt:
    return msgspec.convert(told, Receipt)


def gap_of(told: dict[str, Any]) -> Gap:
    return Gap(**told)


def start_json(start: StartAt, patterns: Sequence[str]) -> dict[str, Any]:
    chosen = start_of(start, patterns)
    told: dict[str, Any] = {"kind": chosen.kind}
    if chosen.kind == "time":
        told["time"] = chosen.time_ns
    if chosen.partitions:
        told["places"] = [
            {"topic": place.topic, "partition": place.partition, "offset": place.offset}
            for place in chosen.partitions
        ]
    return told


def options_json(options: WorkOptions) -> dict[str, Any]:
    told = {field: getattr(options, field) for field in _OPTION_FIELDS}
    return {field: value for field, value in told.items() if value is not None}


def place_json(place: CursorPlace) -> dict[str, Any]:
    told = {field: getattr(place, field) for field in CursorPlace.__struct_fields__}
    del told["lag"]
    return {field: value for field, value in told.items() if value not in (None, 0, ())}


def cursor_of(told: dict[str, Any]) -> CursorState:
    places = [CursorPlace(**place) for place in told["places"]]
    return CursorState(told["name"], places, told["updated_ns"])


def topic_of(told: dict[str, Any]) -> TopicState:
    fields = dict(told)
    fields["partitions"] = [
        PartitionState(
            each["first_offset"],
            each["next_offset"],
            Owner(each["journal"], each["shard"], each["epoch"]),
        )
        for each in told.get("partitions", [])
    ]
    return TopicState(**fields)


def subscription_of(told: dict[str, Any]) -> SubscriptionState:
    fields = _without_texts(SubscriptionState, told)
    fields["options"] = WorkOptions(**told["options"])
    fields["members"] = [
        MemberState(**_without_texts(MemberState, member)) for member in told["members"]
    ]
    fields["partitions"] = [PartitionWork(**each) for each in told.get("partitions", [])]
    return SubscriptionState(**fields)


def _without_texts(form: type[msgspec.Struct], told: dict[str, Any]) -> dict[str, Any]:
    """The fields without the texts that stand beside times in nanoseconds."""
    return {
        field: value
        for field, value in told.items()
        if field in form.__struct_fields__ or f"{field}_ns" not in told
    }
