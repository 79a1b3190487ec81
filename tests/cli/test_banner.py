"""The lines that `runnel serve` prints on a terminal when it is ready."""

from __future__ import annotations

from runnel.cli.render.banner import banner_lines
from runnel.config import Keep, Retain, Settings, TopicRule

CLEAN: tuple[str, ...] = ()
ADDRESSES = ("runnel://127.0.0.1:7470",)


def test_banner_names_addresses_data_and_rules_in_order() -> None:
    settings = Settings(
        data="/var/lib/runnel",
        topics=(
            TopicRule(match="chat/*", keep=Keep.NONE, last_value=True),
            TopicRule(
                match="sensors/*",
                partitions=4,
                journal="sensors",
                retain=Retain(age_ns=7 * 86_400 * 10**9, bytes_max=20 * 2**30),
            ),
            TopicRule(match="jobs/*", keep=Keep.MEMORY),
        ),
    )
    assert banner_lines("0.1.0", settings, ADDRESSES, CLEAN) == [
        "Runnel 0.1.0: node-1 of runnel",
        "listening on runnel://127.0.0.1:7470",
        "data in /var/lib/runnel (clean)",
        "rules: the first that matches a new topic decides",
        "  1. chat/*: not kept, last value",
        "  2. sensors/*: on disk, 4 partitions, journal sensors, retained 7d or 20GiB",
        "  3. jobs/*: in memory, journal jobs/*, retained 256MiB",
        "  then: on disk, journal main, for ever",
    ]


def test_without_rules_it_says_what_holds() -> None:
    lines = banner_lines("0.1.0", Settings(), ADDRESSES, CLEAN)
    assert lines[3:] == ["rules: none; every topic is kept on disk, journal main, for ever"]


def test_in_memory_it_says_that_everything_will_be_lost() -> None:
    settings = Settings(data="memory:", topics=(TopicRule(match="sensors/*", partitions=4),))
    assert banner_lines("0.1.0", settings, ADDRESSES, CLEAN)[2:] == [
        "everything is in memory, and lost when this ends",
        "rules: the first that matches a new topic decides",
        "  1. sensors/*: in memory, 4 partitions, journal sensors/*, retained 256MiB",
        "  then: in memory, journal main, retained 256MiB",
    ]
    lines = banner_lines("0.1.0", Settings(data="memory:"), ADDRESSES, CLEAN)
    assert lines[3:] == [
        "rules: none; every topic is kept in memory, journal main, retained 256MiB"
    ]


def test_what_recovery_found_is_reported_up_to_a_limit() -> None:
    found = [f"torn tail cut: {number}" for number in range(25)]
    lines = banner_lines("0.1.0", Settings(data="d"), ADDRESSES, found)
    assert lines[2] == "data in d (25 remarks below)"
    assert lines[4:24] == [f"note: torn tail cut: {number}" for number in range(20)]
    assert lines[24:] == ["note: … and 5 more"]


def test_names_do_not_steer_the_terminal() -> None:
    lines = banner_lines("0.1.0", Settings(data="a\x1b[31m"), ADDRESSES, CLEAN)
    assert lines[2] == "data in a?[31m (clean)"
