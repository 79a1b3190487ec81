"""Who made a topic, cursor or subscription: records without it are read, and older readers pass over it."""

from __future__ import annotations

import msgspec

from runnel.config import Keep
from runnel.group_rules.definition import Definition, Mode, SubscriptionOptions
from runnel.log.log import Cursor
from runnel.log.metadata.records import Record, TopicMade


def test_records_of_earlier_versions_have_no_owner() -> None:
    old = msgspec.msgpack.encode(["topic", "a", "disk", 1, "main"])
    made = msgspec.msgpack.decode(old, type=Record)
    assert made == TopicMade("a", Keep.DISK, 1, "main", "")
    cursor = msgspec.msgpack.encode({"name": "c", "positions": [], "updated_ns": 1})
    assert msgspec.msgpack.decode(cursor, type=Cursor).owner == ""
    options = msgspec.to_builtins(SubscriptionOptions())
    definition = msgspec.msgpack.encode([1, "s", ["*"], "shared", options, False, 0, []])
    assert msgspec.msgpack.decode(definition, type=Definition).owner == ""


class _OldTopicMade(msgspec.Struct, array_like=True, frozen=True, tag="topic"):
    name: str
    keep: Keep
    partitions: int
    journal: str


def test_an_owner_is_passed_over_by_earlier_versions() -> None:
    new = msgspec.msgpack.encode(TopicMade("a", Keep.DISK, 1, "main", "gateway"))
    assert msgspec.msgpack.decode(new, type=_OldTopicMade).journal == "main"
    owned = Definition(1, "s", ("*",), Mode.SHARED, SubscriptionOptions(), owner="gateway")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(owned), type=Definition) == owned
