"""Requests whose messages have nothing but payloads are known by their size, and by nothing else."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from runnel.doors.grpc.generated import runnel_pb2 as pb
from runnel.doors.grpc.sending import _have_only

PAYLOADS = st.one_of(st.binary(max_size=3), st.sampled_from([127, 128, 16_383, 16_384]).map(bytes))
# Each of them is a field that is set, if only to what it would be anyway.
EXTRAS = st.sampled_from(
    [
        {},
        {"key": b""},
        {"partition_key": b""},
        {"partition": 0},
        {"topic": "b"},
        {"tags": {"": ""}},
        {"event_time_ns": 1},
        {"transmit_time_ns": 1},
        {"uid": b""},
    ]
)


@given(
    st.lists(st.tuples(PAYLOADS, EXTRAS), min_size=1, max_size=6),
    st.integers(0, 2**64 - 1),
    st.sampled_from(["", "a", "a/b" * 50]),
    st.sampled_from([0, 2, 3]),
)
def test_plain_messages_are_those_without_any_other_field(
    messages: list[tuple[bytes, dict[str, Any]]], number: int, topic: str, level: int
) -> None:
    made = [pb.Message(payload=payload, **extras) for payload, extras in messages]
    request = pb.PublishRequest(id=number, topic=topic, level=pb.Level.Name(level), messages=made)
    received = pb.PublishRequest.FromString(request.SerializeToString())
    are_plain = not any(extras for _, extras in messages)
    assert _have_only(received, [payload for payload, _ in messages]) is are_plain
