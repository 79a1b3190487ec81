"""Which keys differ between two settings, and what a running broker goes on with."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from runnel.config import ClusterSettings, LogLevel, Retain, SecuritySettings, Settings, TopicRule
from runnel.config.changes import RELOADABLE, Change, changes_between, taken_over
from runnel.config.keys import PLAIN_KEYS
from runnel.config.settings import DAY_NS, LimitSettings

OLD = Settings(topics=(TopicRule(match="a/*", retain=Retain(age_ns=DAY_NS)), TopicRule(match="b")))


def test_equal_settings_have_no_changes() -> None:
    assert changes_between(OLD, OLD) == []


def test_each_key_that_differs_is_reported_as_the_file_writes_it() -> None:
    new = replace(
        OLD,
        log_level=LogLevel.DEBUG,
        cluster=ClusterSettings(node="other"),
        topics=(TopicRule(match="a/*", retain=Retain(age_ns=7 * DAY_NS)), TopicRule(match="b")),
    )
    assert changes_between(OLD, new) == [
        Change("log_level", '"info"', '"debug"', is_reloadable=True),
        Change("cluster.node", '"node-1"', '"other"', is_reloadable=False),
        Change("topics[0].retain.age", '"1d"', '"7d"', is_reloadable=True),
    ]


def test_rule_that_only_one_has_is_told_without_its_defaults() -> None:
    fewer = replace(OLD, topics=OLD.topics[:1])
    assert changes_between(fewer, OLD) == [
        Change("topics[1].match", "absent", '"b"', is_reloadable=True)
    ]
    assert changes_between(OLD, fewer) == [
        Change("topics[1].match", '"b"', "absent", is_reloadable=True)
    ]


def test_only_what_can_be_taken_over_is() -> None:
    new = Settings(
        data="elsewhere",
        log_level=LogLevel.ERROR,
        limits=LimitSettings(tags_max=1),
        security=SecuritySettings(token_connections_max=3, tokens_file="other.json"),
    )
    assert taken_over(OLD, new) == Settings(
        log_level=LogLevel.ERROR, security=SecuritySettings(token_connections_max=3)
    )


@pytest.mark.parametrize("name", sorted(RELOADABLE))
def test_every_reloadable_key_is_one(name: str) -> None:
    assert name in PLAIN_KEYS
