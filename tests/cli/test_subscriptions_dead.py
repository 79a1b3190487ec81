"""`runnel subscriptions` and `runnel dead` against a real broker."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from runnel.cli.main import run
from runnel.cli.render.dead_letters import letter_lines, letter_table
from runnel.cli.render.subscription_tables import (
    member_table,
    partition_table,
    subscription_lines,
    subscription_table,
)
from runnel.formats.message import Message
from runnel.formats.work_heads import MemberState, PartitionWork, SubscriptionState, WorkOptions

NOW_NS = 1_700_000_400 * 10**9
BEGAN_NS = NOW_NS - 400 * 10**9
OPTIONS = WorkOptions(30_000, 3_600_000, 8, 1000, 300_000, 2.0, 3_600_000)
SHARED = SubscriptionState(
    "billing", "shared", ["orders/*", "refunds"], False, BEGAN_NS, OPTIONS,
    [MemberState("", 3, 1500, 20, 4, NOW_NS - 65 * 10**9)], 7, 2,
    [PartitionWork("", "orders/eu", 1, 18, 1520, 2, 20)],
)  # fmt: skip
MULTICAST = SubscriptionState(
    "news", "multicast", [f"n{number}" for number in range(5)], True, BEGAN_NS, OPTIONS,
    [MemberState("ann", 1, 0, 0, 0, 0), MemberState("bob", 0, 9, 0, 0, BEGAN_NS, BEGAN_NS)], 0, 0,
    [PartitionWork("bob", "n1", 0, 1, 10, 0, 0)],
)  # fmt: skip
LETTER = Message(
    "!dead/billing", b"21\x1b", b"k",
    {
        "unit": "C", "dead.error": "no such\ncustomer", "dead.topic": "orders/eu",
        "dead.partition": "1", "dead.offset": "17", "dead.deliveries": "8", "dead.from": "billing",
    },
    BEGAN_NS, receive_time_ns=NOW_NS, offset=5,
)  # fmt: skip


# --- Tables ---


def test_list_sums_up_the_members() -> None:
    assert subscription_table([SHARED, MULTICAST], NOW_NS).lines() == [
        "subscription  mode       state   topics                 backlog  in flight  delayed  oldest"
        "  redelivered  dead  consumers",
        "billing       shared     active  orders/* refunds         1,500         20        4    1m5s"
        "            7     2          3",
        "news          multicast  paused  n0 n1 n2 … and 2 more        9          0        0   6m40s"
        "            0     0          1",
    ]


def test_subscription_is_shown_in_lines_and_tables() -> None:
    assert subscription_lines(SHARED, NOW_NS) == [
        "subscription: billing",
        "mode:         shared",
        "state:        active",
        "topics:       orders/* refunds",
        "made:         2023-11-14T22:13:20Z",
        "lease:        30s, renewed for 1h at most",
        "retries:      after 1s, then 2 times as long each time, up to 5m",
        "gives up:     after 8 deliveries",
        "backlog:      1,500, the oldest for 1m5s",
        "in flight:    20",
        "delayed:      4",
        "redelivered:  7 since the broker started",
        "dead letters: 2",
        "consumers:    3",
    ]
    assert partition_table(SHARED).lines() == [
        "topic      partition  next to ack  acked beyond   end  backlog  in flight",
        "orders/eu          1           18             2  1520    1,500         20",
    ]


def test_multicast_is_shown_by_member() -> None:
    assert "absent:       members for 1h at most" in subscription_lines(MULTICAST, NOW_NS)
    assert member_table(MULTICAST, NOW_NS).lines() == [
        "member  backlog  in flight  delayed  oldest  absent for",
        "ann           0          0        0       -           -",
        "bob           9          0        0   6m40s       6m40s",
    ]
    assert partition_table(MULTICAST).lines()[1].split()[:3] == ["bob", "n1", "0"]


def test_dead_letter_says_what_it_was_without_steering_the_terminal() -> None:
    assert letter_table([LETTER]).lines() == [
        "offset  since                 was              deliveries  error",
        r"     5  2023-11-14T22:20:00Z  orders/eu[1]@17           8  no such\ncustomer",
    ]
    assert letter_lines("billing", LETTER) == [
        "subscription: billing",
        "offset:       5",
        "since:        2023-11-14T22:20:00Z",
        "was:          orders/eu[1]@17",
        "deliveries:   8",
        r"error:        no such\ncustomer",
        "key:          k",
        "tags:         unit=C",
        "event time:   2023-11-14T22:13:20.000000000Z",
        "size:         3 B",
    ]


def test_dead_letter_shows_its_traceback_without_steering_the_terminal() -> None:
    tags = dict(LETTER.tags) | {
        "dead.error_type": "shop.CustomerError",
        "dead.traceback": '  File "shop.py", line 3, in bill\n    raise \x1b[2J\nshop.CustomerError',
    }
    lines = letter_lines("billing", msgspec.structs.replace(LETTER, tags=tags))
    assert "error type:   shop.CustomerError" in lines
    assert lines[-4:] == [
        "traceback:",
        '    File "shop.py", line 3, in bill',
        r"      raise \x1b[2J",
        "  shop.CustomerError",
    ]


# --- Subscriptions ---


def publish(topic: str, *payloads: str) -> None:
    assert run(["pub", topic, *payloads, "-q"]) == 0


def make(name: str, *words: str) -> None:
    assert run(["subscriptions", "make", name, *words]) == 0


def backlog(name: str, capfd: pytest.CaptureFixture[str]) -> int:
    capfd.readouterr()
    assert run(["subscriptions", "show", name, "--format", "json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    return sum(member["backlog"] for member in shown["members"])


def test_subscription_is_made_listed_and_deleted(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("made/a", "1", "2")
    make("maker", "made/*", "--mode", "key_shared", "--lease", "5s", "--deliveries-max", "0")
    assert capfd.readouterr().err == "made maker\n"
    assert run(["subscriptions", "mak*"]) == 0
    lines = [re.split(r" {2,}", line) for line in capfd.readouterr().out.splitlines()]
    assert lines[0][:4] == ["subscription", "mode", "state", "topics"]
    assert lines[1][:5] == ["maker", "key_shared", "active", "made/*", "2"]
    assert run(["subscriptions", "show", "maker"]) == 0
    shown = capfd.readouterr().out
    assert re.search(r"^lease: +5s, ", shown, re.MULTILINE)
    assert re.search(r"^gives up: +never$", shown, re.MULTILINE)
    assert re.search(r"^made/a +0 +1 +0 +3 +2 +0$", shown, re.MULTILINE)
    assert run(["subscriptions", "delete", "maker", "--yes"]) == 0
    assert capfd.readouterr().err == "deleted maker\n"
    assert run(["subscriptions", "mak*"]) == 0
    assert capfd.readouterr() == ("", "no subscription matches mak*\n")


def test_json_has_names_for_everything(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    publish("named", "1")
    make("named", "named")
    capfd.readouterr()
    assert run(["subscriptions", "list", "named", "--format", "json"]) == 0
    (listed,) = json.loads(capfd.readouterr().out)
    assert (listed["name"], listed["mode"], listed["patterns"]) == ("named", "shared", ["named"])
    assert listed["options"]["deliveries_max"] == 8
    assert run(["subscriptions", "show", "named", "--format", "json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    (partition,) = shown.pop("partitions")
    assert (partition["topic"], partition["floor"], partition["next_offset"]) == ("named", 1, 2)
    assert shown.keys() == listed.keys()


def test_paused_subscription_delivers_nothing_until_it_is_resumed(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("paused", "1")
    make("paused", "paused")
    assert run(["subscriptions", "pause", "paused"]) == 0
    assert run(["consume", "paused", "--count", "1", "--timeout", "0.2"]) == 1
    assert run(["subscriptions", "list", "paused"]) == 0
    assert re.search(r"^paused +shared +paused ", capfd.readouterr().out, re.MULTILINE)
    assert run(["subscriptions", "resume", "paused"]) == 0
    assert run(["consume", "paused", "--count", "1", "--timeout", "20"]) == 0


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--to", "latest"], 0),
        (["--to", "earliest"], 6),
        (["--to", "1h"], 6),
        (["--to", "2", "--topic", "moved/a"], 4),
        (["--to", "latest", "--topic", "moved/a"], 2),
        (["--to", "latest", "--topic", "moved/a", "--partition", "0"], 2),
        (["--to", "1h", "--topic", "moved/b"], 5),
        (["--to", "2200-01-01", "--topic", "moved/a"], 2),
    ],
)
def test_moved_subscription_owes_what_lies_behind_its_place(
    words: list[str], left: int, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "moved " + " ".join(words)
    if run(["topics", "show", "moved/a"]):
        publish("moved/a", "1", "2", "3")
        publish("moved/b", "1", "2", "3")
    make(name, "moved/*")
    # Of each topic one is acknowledged.
    for topic in ("moved/a", "moved/b"):
        assert run(["subscriptions", "move", name, "--to", "2", "--topic", topic, "--yes"]) == 0
    assert backlog(name, capfd) == 4
    assert run(["subscriptions", "move", name, *words, "--yes"]) == 0
    assert capfd.readouterr().err == f"moved {name}\n"
    assert backlog(name, capfd) == left


def test_member_that_is_removed_is_owed_nothing(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("member", "1")
    words = ["--mode", "multicast", "--member", "ann", "--start", "earliest", "--no-ack"]
    assert run(["consume", "member", "member", *words, "--count", "1", "--timeout", "20"]) == 0
    assert backlog("member", capfd) == 1
    assert run(["subscriptions", "show", "member"]) == 0
    assert re.search(r"^ann +1 +0 +0 ", capfd.readouterr().out, re.MULTILINE)
    assert run(["subscriptions", "remove-member", "member", "ann", "--yes"]) == 0
    assert capfd.readouterr().err == "removed ann of member\n"
    assert backlog("member", capfd) == 0


@pytest.mark.parametrize(
    "words",
    [["delete", "dear"], ["move", "dear", "--to", "latest"], ["remove-member", "dear", "ann"]],
)
def test_nothing_is_forgotten_without_a_yes(
    words: list[str], url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    publish("dear", "1")
    make("dear", "dear")
    assert run(["subscriptions", *words]) == 2
    assert "There is no terminal to ask at: say so with --yes" in capfd.readouterr().err
    assert backlog("dear", capfd) > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["show", "nobody"], "subscription 'nobody' does not exist"),
        (["delete", "nobody", "-y"], "subscription 'nobody' does not exist"),
        (["pause", "nobody"], "subscription 'nobody' does not exist"),
        (["make", "taken", "taken", "--mode", "key_shared"], "'taken' is shared, not key_shared"),
        (["make", "taken", "other"], "'taken' is over taken, not over other"),
        (["make", "new", "a["], "a["),
        (["make", "new", "a", "--lease", "soon"], "--lease: 'soon' is not a duration; write"),
        (["make", "new", "a", "--lease", "1ms"], "too short to be renewed in time"),
        (["move", "taken", "--to", "5", "-y"], "--to 5 is an offset: say of which topic"),
        (["move", "taken", "--to", "latest", "--partition", "0", "-y"], "say of which topic"),
        (["move", "taken", "--to", "9", "--topic", "taken", "-y"], "not between 1 and 2"),
        (["move", "taken", "--to", "1", "--topic", "dear", "-y"], "dear"),
        (["move", "taken", "--to", "1", "--topic", "split/move", "-y"], "has 2 partitions"),
        (
            ["move", "taken", "--to", "1", "--topic", "taken", "--partition", "3", "-y"],
            "'taken' has no partition 3",
        ),
        (["remove-member", "taken", "ann", "-y"], "subscription 'taken' has no member 'ann'"),
    ],
)
def test_wrong_subscription_is_refused_in_a_line(
    words: list[str], problem: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if run(["subscriptions", "show", "taken"]):
        publish("taken", "1")
        publish("split/move", "1")
        make("taken", "taken")
    capfd.readouterr()
    assert run(["subscriptions", *words]) == 2
    told = capfd.readouterr().err
    assert problem in told
    assert told.count("\n") == 1


# --- Dead letters ---


def make_dead_letters(name: str, *payloads: str) -> None:
    """Messages that fail at the first attempt, and are given up then."""
    publish(name, *payloads)
    make(name, name, "--deliveries-max", "1")
    command = 'echo "bad $(cat)" >&2; exit 1'
    words = ["--count", str(len(payloads)), "--timeout", "20"]
    assert run(["consume", name, "--exec", command, *words]) == 0
    # The letters are stored a little later: a reader of their topic sees them arrive.
    assert run(["sub", f"!dead/{name}", "--from", "earliest", *words]) == 0


def dead_offsets(name: str, capfd: pytest.CaptureFixture[str], *words: str) -> list[int]:
    capfd.readouterr()
    assert run(["dead", name, "--format", "json", *words]) == 0
    return [letter["offset"] for letter in json.loads(capfd.readouterr().out)]


def test_dead_letters_are_counted_listed_and_shown(
    url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make_dead_letters("buried", "1", "2")
    capfd.readouterr()
    assert run(["dead"]) == 0
    assert re.search(r"^buried +2$", capfd.readouterr().out, re.MULTILINE)
    assert run(["dead", "list", "--format", "json"]) == 0
    assert {"subscription": "buried", "dead": 2} in json.loads(capfd.readouterr().out)
    assert run(["dead", "buried"]) == 0
    lines = [re.split(r" {2,}", line.strip()) for line in capfd.readouterr().out.splitlines()]
    assert lines[0] == ["offset", "since", "was", "deliveries", "error"]
    assert [(line[0], *line[2:]) for line in lines[1:]] == [
        ("1", "buried[0]@1", "1", "bad 1"),
        ("2", "buried[0]@2", "1", "bad 2"),
    ]
    assert run(["dead", "show", "buried", "2"]) == 0
    shown = capfd.readouterr().out
    assert "error:        bad 2\n" in shown
    assert shown.endswith("\n\n2\n")
    assert run(["dead", "show", "buried", "2", "--format", "raw"]) == 0
    assert capfd.readouterr().out == "2\n"
    assert run(["dead", "show", "buried", "2", "--format", "json"]) == 0
    letter = json.loads(capfd.readouterr().out)
    assert (letter["payload"], letter["tags"]) == ("2", {})
    assert letter["dead"] == {
        "subscription": "buried",
        "topic": "buried",
        "partition": 0,
        "offset": 2,
        "deliveries": 1,
        "error": "bad 2",
        "error_type": None,
        "traceback": None,
    }


def test_long_list_is_reported_in_parts(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    make_dead_letters("many", "1", "2", "3")
    capfd.readouterr()
    assert run(["dead", "many", "--count", "2"]) == 0
    captured = capfd.readouterr()
    assert len(captured.out.splitlines()) == 3
    assert captured.err == "there may be more: --from 3\n"
    assert dead_offsets("many", capfd, "--from", "3") == [3]


def test_letter_that_is_sent_back_comes_again(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    make_dead_letters("again", "1", "2", "3")
    capfd.readouterr()
    assert run(["dead", "redrive", "again", "2"]) == 0
    assert capfd.readouterr().err == "sent back 1 dead letter\n"
    assert dead_offsets("again", capfd) == [1, 3]
    assert run(["dead", "redrive", "again", "1", "2"]) == 0
    assert capfd.readouterr().err == (
        "sent back 1 dead letter of 2; the others were sent back or dropped before\n"
    )
    assert run(["dead", "redrive", "again", "--all"]) == 0
    assert capfd.readouterr().err == "sent back 1 dead letter\n"
    assert dead_offsets("again", capfd) == []
    command = "cat; echo :$MESSAGE_ATTEMPT"
    assert run(["consume", "again", "--exec", command, "--count", "3", "--timeout", "20"]) == 0
    assert sorted(capfd.readouterr().out.split()) == ["1:1", "2:1", "3:1"]


def test_letter_that_is_dropped_is_gone(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    make_dead_letters("dropped", "1", "2", "3")
    capfd.readouterr()
    assert run(["dead", "drop", "dropped", "2"]) == 2
    assert "Drop 1 dead letter of dropped? There is no terminal" in capfd.readouterr().err
    assert run(["dead", "drop", "dropped", "2", "--yes"]) == 0
    assert capfd.readouterr().err == "dropped 1 dead letter\n"
    assert dead_offsets("dropped", capfd) == [1, 3]
    assert run(["dead", "drop", "dropped", "--all", "-y"]) == 0
    assert capfd.readouterr().err == "dropped 2 dead letters\n"
    assert run(["dead", "dropped"]) == 0
    assert capfd.readouterr() == ("", "dropped has no dead letters\n")
    assert backlog("dropped", capfd) == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["list", "nobody"], "subscription 'nobody' does not exist"),
        (["show", "healthy", "1"], "subscription 'healthy' has no dead letter 1"),
        (["redrive", "healthy", "1", "7"], "'healthy' has no dead letter 1, 7, or not any more"),
        (["redrive", "healthy"], "which? Give offsets as `runnel dead list` shows them, or --all"),
        (["drop", "healthy", "1", "--all", "-y"], "offsets and --all were given"),
        (["redrive", "nobody", "--all"], "subscription 'nobody' does not exist"),
    ],
)
def test_wrong_dead_letter_is_refused_in_a_line(
    words: list[str], problem: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make("healthy", "healthy")
    capfd.readouterr()
    assert run(["dead", *words]) == 2
    told = capfd.readouterr().err
    assert problem in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("offset", ["0", "x", "-1"])
def test_offset_that_is_none_is_refused(
    offset: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["dead", "redrive", "healthy", "--", offset]) == 2
    assert "Invalid value for 'OFFSETS'" in capfd.readouterr().err
