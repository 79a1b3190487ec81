"""Rules that change while the broker is at work."""

from __future__ import annotations

import pytest

from runnel.broker.fetcher import FetchRequest
from runnel.config import Keep, Retain, Rotate, TopicRule
from runnel.config.settings import DAY_NS
from runnel.errors import OffsetGoneError
from runnel.topics.policies import Policies
from tests.broker.scenes import LAST, At, scene

KEPT = TopicRule(match="kept/*", journal="kept")
LIVE = TopicRule(match="live/*", keep=Keep.NONE, last_value=True)


@scene(KEPT, LIVE)
async def test_rules_that_change_hold_for_topics_and_journals_that_exist(at: At) -> None:
    await at.publish("kept/a", b"old")
    await at.publish("live/a", b"last")
    at.clock.advance(2 * DAY_NS)
    await at.publish("kept/a", b"new")
    assert (await at.broker.fetch(FetchRequest("kept/a", 0, offset=1))).next_offset == 3
    by_age = TopicRule(
        match="kept/*",
        journal="kept",
        partitions=2,
        retain=Retain(age_ns=DAY_NS),
        rotate=Rotate(bytes_max=8192),
    )
    not_last = TopicRule(match="live/*", keep=Keep.NONE)
    differences = await at.broker.follow_rules(Policies([by_age, not_last]))
    assert [(each.topic, each.key, each.recorded, each.now) for each in differences] == [
        ("kept/a", "partitions", "1", "2")
    ]
    with pytest.raises(OffsetGoneError):
        await at.broker.fetch(FetchRequest("kept/a", 0, offset=1))
    reader, subscription = await at.subscribe("live/*", start=LAST)
    await at.settle(subscription)
    assert reader.payloads() == []
    # A new topic has what the rules say now, and with the old rules everything is as it was.
    await at.publish("kept/b", b"1", partition=1)
    assert await at.broker.follow_rules(Policies([KEPT, LIVE])) != []
    assert (await at.broker.fetch(FetchRequest("kept/a", 0, offset=1))).next_offset == 3
    await at.publish("live/a", b"again")
    late, subscription = await at.subscribe("live/*", start=LAST)
    await at.settle(subscription)
    assert late.payloads() == [b"again"]
