"""The audit trail: changes name their token, denials are bounded and what is left out is counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from runnel.broker.monitoring.audit import AUDIT_TOPIC, Audit, AuditKind
from runnel.errors import ClosedError
from runnel.security.authenticator import TokenChange
from tests.fakes.clock import NS_PER_SECOND, VirtualClock


class Trail:
    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = []
        self.clock = VirtualClock()
        self.audit = Audit(self.clock, self._publish)

    def _publish(self, topic: str, payload: bytes, tags: Mapping[str, str]) -> None:
        document = msgspec.json.decode(payload)
        assert topic == AUDIT_TOPIC
        assert tags == {"kind": document["kind"]}
        self.documents.append(document)


def test_a_change_names_its_token_and_where_it_came_from() -> None:
    trail = Trail()
    trail.audit.record(AuditKind.TOPIC_DELETED, "orders", token="gateway", peer="10.0.0.1:5")
    (document,) = trail.documents
    assert document.pop("time_ns") == trail.clock.time_ns()
    assert document == {
        "kind": "topic_deleted",
        "subject": "orders",
        "token": "gateway",
        "peer": "10.0.0.1:5",
    }


def test_every_change_is_told_however_many_there_are() -> None:
    trail = Trail()
    for number in range(1000):
        trail.audit.record(AuditKind.TOPIC_PURGED, f"t{number}", token="a")
    assert len(trail.documents) == 1000


def test_denials_of_a_token_beyond_a_bound_are_counted_and_those_of_others_are_reported() -> None:
    trail = Trail()
    for number in range(50):
        trail.audit.deny("fetch", f"no {number}", token="eve")
    trail.audit.deny("fetch", "no", token="bob")
    assert [each["token"] for each in trail.documents] == ["eve"] * 10 + ["bob"]
    assert trail.audit.denied_count == 51
    trail.audit.flush()
    assert len(trail.documents) == 11  # its second is not over
    trail.clock.advance(NS_PER_SECOND)
    trail.audit.flush()
    assert trail.documents[-1]["token"] == "eve"
    assert trail.documents[-1]["left_out"] == 40
    trail.audit.flush()
    assert len(trail.documents) == 12  # once
    trail.audit.deny("fetch", "again", token="eve")
    assert trail.documents[-1]["problem"] == "again"


def test_what_very_many_tokens_are_denied_takes_bounded_memory() -> None:
    trail = Trail()
    for number in range(5000):
        trail.audit.deny("fetch", "no", token=f"t{number}")
    assert len(trail.documents) == 1000 + 10
    trail.clock.advance(NS_PER_SECOND)
    trail.audit.flush()
    assert trail.documents[-1]["left_out"] == 5000 - 1010
    assert trail.audit.denied_count == 5000


def test_a_token_that_was_changed_is_reported_by_name() -> None:
    trail = Trail()
    for change in TokenChange:
        trail.audit.token_changed(change, "gateway")
    assert [(each["kind"], each["subject"]) for each in trail.documents] == [
        ("token_added", "gateway"),
        ("token_changed", "gateway"),
        ("token_revoked", "gateway"),
    ]


def test_a_trail_that_cannot_be_published_stops_nothing() -> None:
    def publish(topic: str, payload: bytes, tags: Mapping[str, str]) -> None:
        raise ClosedError("the broker is closed")

    Audit(VirtualClock(), publish).record(AuditKind.TOPIC_DELETED, "a", token="")
