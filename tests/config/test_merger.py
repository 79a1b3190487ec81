"""Which source holds, and that every value knows its source."""

from __future__ import annotations

import pytest

from runnel.config import (
    Keep,
    LimitSettings,
    Origin,
    Pin,
    Retain,
    Rotate,
    Settings,
    TopicRule,
    Until,
)
from tests.config.sources import merged

DAY_NS = 86_400 * 10**9
RULES = """
[[topics]]
match = "sensors/*"
keep = "disk"
partitions = 4
journal = "sensors"
rotate = { bytes = "128MiB", every = "1h", at = "00:30" }
retain = { age = "7d", bytes = "20GiB", until = "acked" }
pin = { age = "none", bytes = "100GB" }
last_value = true

[[topics]]
match = "chat/*"
keep = "none"
"""


def test_without_any_source_the_defaults_hold() -> None:
    loaded = merged()
    assert loaded.settings == Settings()
    assert {source.origin for source in loaded.sources.values()} == {Origin.DEFAULT}


def test_each_source_outweighs_those_before_it() -> None:
    key = "limits.tags_max"
    toml = "[limits]\ntags_max = 1"
    environment = {"RUNNEL_LIMITS_TAGS_MAX": "2"}
    flags = ["limits.tags_max=3"]
    expected = [
        (merged(), 64, "default"),
        (merged(toml), 1, "runnel.toml:2"),
        (merged(toml, environment), 2, "RUNNEL_LIMITS_TAGS_MAX"),
        (merged(toml, environment, flags), 3, "--set limits.tags_max"),
        (merged(toml, {}, flags), 3, "--set limits.tags_max"),
        (merged("", environment), 2, "RUNNEL_LIMITS_TAGS_MAX"),
    ]
    for loaded, tags_max, source in expected:
        assert loaded.settings.limits.tags_max == tags_max
        assert str(loaded.sources[key]) == source


def test_the_later_of_two_flags_holds() -> None:
    assert merged(assignments=["data=a", "data=b"]).settings.data == "b"


def test_a_program_may_bring_its_own_defaults() -> None:
    defaults = Settings(
        data="elsewhere",
        limits=LimitSettings(tags_max=8),
        topics=(TopicRule(match="a/*", retain=Retain(age_ns=DAY_NS, until=Until.ACKED)),),
    )
    loaded = merged("[limits]\nproducers_max = 5", defaults=defaults)
    assert loaded.settings.data == "elsewhere"
    assert loaded.settings.limits == LimitSettings(tags_max=8, producers_max=5)
    assert loaded.settings.topics == defaults.topics


def test_sizes_and_durations_of_every_source_become_integers() -> None:
    loaded = merged(
        '[log]\nretention_interval = "1m"\nallocate_bytes = 0',
        {"RUNNEL_LIMITS_TAG_BYTES_MAX": "1KiB", "RUNNEL_LIMITS_MESSAGE_BYTES_MAX": "1000"},
        ["log.producer_age_max=1h30m"],
    )
    assert loaded.settings.log.retention_interval_ns == 60 * 10**9
    assert loaded.settings.log.allocate_bytes == 0
    assert loaded.settings.limits.tag_bytes_max == 1024
    assert loaded.settings.limits.message_bytes_max == 1000
    assert loaded.settings.log.producer_age_max_ns == 5400 * 10**9


def test_rules_are_read_with_their_tables() -> None:
    sensors, chat = merged(RULES).settings.topics
    assert sensors == TopicRule(
        match="sensors/*",
        keep=Keep.DISK,
        partitions=4,
        journal="sensors",
        rotate=Rotate(bytes_max=128 * 2**20, every_ns=3600 * 10**9, at_ns=1800 * 10**9),
        retain=Retain(age_ns=7 * DAY_NS, bytes_max=20 * 2**30, until=Until.ACKED),
        pin=Pin(age_ns=None, bytes_max=100 * 10**9),
        last_value=True,
    )
    assert chat == TopicRule(match="chat/*", keep=Keep.NONE)


def test_values_of_rules_know_their_lines_and_absent_ones_are_defaults() -> None:
    sources = merged(RULES).sources
    assert str(sources["topics[0].match"]) == "runnel.toml:3"
    assert str(sources["topics[0].retain.age"]) == "runnel.toml:8"
    assert str(sources["topics[1].keep"]) == "runnel.toml:14"
    assert str(sources["topics[1].retain.age"]) == "default"


def test_rules_of_a_later_source_replace_all_earlier_ones() -> None:
    loaded = merged(RULES, {"RUNNEL_TOPICS": '[{ match = "x", keep = "memory" }]'})
    assert loaded.settings.topics == (TopicRule(match="x", keep=Keep.MEMORY),)
    assert str(loaded.sources["topics[0].keep"]) == "RUNNEL_TOPICS"
    assert merged(RULES, assignments=["topics=[]"]).settings.topics == ()


def test_rules_can_come_from_a_flag() -> None:
    loaded = merged(assignments=['topics=[{ match = "x", rotate = { every = "none" } }]'])
    assert loaded.settings.topics[0].rotate.every_ns is None
    assert str(loaded.sources["topics[0].rotate.every"]) == "--set topics"


def test_variables_of_others_are_not_looked_at() -> None:
    environment = {"PATH": "/bin", "runnel_data": "x", "_RUNNEL_COMPLETE": "y", "RUNNELS": "z"}
    assert merged(environment=environment | {"RUNNEL_CONFIG": "q.toml"}).settings == Settings()


@pytest.mark.parametrize("struct", [Settings(), TopicRule(match="a"), Rotate(), Pin()])
def test_settings_are_frozen(struct: object) -> None:
    with pytest.raises(AttributeError):
        setattr(struct, "data", "x")  # noqa: B010 - the type checker knows it is wrong


def test_a_list_of_texts_is_an_array_in_a_file_and_has_commas_elsewhere() -> None:
    key = "http.hosts"
    toml = '[http]\nhosts = ["a.example", "b.example"]'
    assert merged(toml).settings.http.hosts == ("a.example", "b.example")
    variable = {"RUNNEL_HTTP_HOSTS": "c.example, d.example"}
    assert merged(toml, variable).settings.http.hosts == ("c.example", "d.example")
    loaded = merged(toml, variable, [f"{key}=e.example"])
    assert loaded.settings.http.hosts == ("e.example",)
    assert str(loaded.sources[key]) == f"--set {key}"
    assert merged(toml, {}, [f"{key}=none"]).settings.http.hosts == ()
