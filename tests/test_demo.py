"""The demo: its proof finds whatever is lost, twice or wrong; it runs to its end, and leaves no process behind."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import psutil
import pytest

from examples.demo.__main__ import main
from examples.demo.dashboard import ReadingTally
from examples.demo.evidence import (
    DashboardFound,
    Evidence,
    PipelineReport,
    ShopReport,
    Sum,
    Times,
    TopicRows,
    WindowsFound,
    load,
    save,
)
from examples.demo.invoices import Invoice, count_work
from examples.demo.proof import judge
from examples.demo.world import (
    STATIONS,
    OrderSource,
    cents,
    is_poisonous,
    order,
    order_name,
    payable,
)
from runnel.cli.main import run
from tests.cli.conftest import environment

ROOT = Path(__file__).parents[1]
RUN_SECONDS_MAX = 280
READINGS = 30  # of each station
ORDERS = {OrderSource.WEB: 120, OrderSource.PARTNER: 80}


# --- A world on paper: everything went well ---


def summed(payloads: list[bytes]) -> Sum:
    sums = Sum()
    for payload in payloads:
        sums.add(payload)
    return sums


def invoices() -> list[bytes]:
    return [
        msgspec.json.encode(Invoice(order_name(source.topic, number), cents(number), 1))
        for source, count in ORDERS.items()
        for number in payable(count)
    ]


def dead_letters() -> list[tuple[str, int]]:
    return [
        (source.topic, number)
        for source, count in ORDERS.items()
        for number in range(1, count + 1)
        if is_poisonous(number)
    ]


def shop(source: OrderSource) -> ShopReport:
    sent = summed([order(source, number) for number in range(1, ORDERS[source] + 1)])
    return ShopReport(sent=sent, seen=len(invoices()), is_stopped=True)


def rows(sums: Sum) -> TopicRows:
    count = sums.messages
    copy = msgspec.structs.replace(sums)
    return TopicRows(rows=copy, first_offset=1, last_offset=count, distinct=count)


def evidence() -> Evidence:
    readings = {
        station.topic: summed([station.reading(number) for number in range(1, READINGS + 1)])
        for station in STATIONS
    }
    made = Evidence(
        readings=readings,
        stored={},
        web=shop(OrderSource.WEB),
        partner=shop(OrderSource.PARTNER),
        dashboard=DashboardFound(
            expected=600,
            seen=600,
            missing=0,
            again=0,
            misplaced=0,
            known_at_once=24,
            p50_ms=1.0,
            p99_ms=2.0,
            longest_ms=900.0,
        ),
        work=count_work(ORDERS, invoices(), dead_letters(), left=0),
        pipeline=PipelineReport(),
        archive={},
        windows=WindowsFound(rows=0, messages=0, size_bytes=0),
        times=Times(
            publishing_s=10.0,
            killed_at_s=5.0,
            archived_at_kill=500,
            away_s=1.0,
            waited=100,
            worker_killed_at_s=2.0,
            in_hand_at_kill=3,
            total_s=30.0,
        ),
        broker_exit_code=0,
    )
    published = made.published()
    made.stored = {topic: sums.messages for topic, sums in published.items()}
    made.archive = {topic: rows(sums) for topic, sums in published.items()}
    made.windows.messages = sum(sums.messages for sums in published.values())
    made.windows.size_bytes = sum(sums.size_bytes for sums in published.values())
    return made


def broken(found: Evidence) -> set[str]:
    return {claim.what for claim in judge(found) if not claim.holds}


def test_every_claim_holds_where_everything_went_well() -> None:
    assert broken(evidence()) == set()


TOPIC = STATIONS[0].topic


def lose_a_reading(found: Evidence) -> None:
    found.stored[TOPIC] -= 1


def store_an_order_twice(found: Evidence) -> None:
    found.stored[OrderSource.WEB.topic] += 1


def lose_a_delivery(found: Evidence) -> None:
    found.dashboard.seen -= 1


def deliver_twice(found: Evidence) -> None:
    found.partner.again += 1


def lose_an_invoice(found: Evidence) -> None:
    found.work = count_work(ORDERS, invoices()[1:], dead_letters(), left=0)


def bill_another_price(found: Evidence) -> None:
    wrong = msgspec.json.encode(Invoice("web-1", cents(1) + 1, 1))
    found.work = count_work(ORDERS, [wrong, *invoices()[1:]], dead_letters(), left=0)


def bury_a_good_order(found: Evidence) -> None:
    letters = [*dead_letters(), (OrderSource.WEB.topic, 1)]
    found.work = count_work(ORDERS, invoices(), letters, left=0)


def lose_a_dead_letter(found: Evidence) -> None:
    found.work = count_work(ORDERS, invoices(), dead_letters()[1:], left=0)


def leave_work_undone(found: Evidence) -> None:
    found.work = count_work(ORDERS, invoices(), dead_letters(), left=1)


def archive_a_message_twice(found: Evidence) -> None:
    found.archive[TOPIC].rows.messages += 1


def leave_a_gap_in_the_archive(found: Evidence) -> None:
    found.archive[TOPIC].last_offset += 1


def change_a_payload_in_the_archive(found: Evidence) -> None:
    found.archive[TOPIC].rows.checksum += 1


def lose_a_topic_of_the_archive(found: Evidence) -> None:
    del found.archive[TOPIC]


def lose_a_message_of_a_window(found: Evidence) -> None:
    found.windows.messages -= 1


def crash_at_the_end(found: Evidence) -> None:
    found.broker_exit_code = -11


@pytest.mark.parametrize(
    ("tamper", "found_by"),
    [
        (lose_a_reading, "readings of 24 stations"),
        (store_an_order_twice, "orders over REST"),
        (lose_a_delivery, "readings, live dashboard"),
        (deliver_twice, "lost, twice or misplaced"),
        (lose_an_invoice, "orders with an invoice"),
        (bill_another_price, "cents billed"),
        (bury_a_good_order, "wrong, or left undone"),
        (lose_a_dead_letter, "dead letters"),
        (leave_work_undone, "wrong, or left undone"),
        (archive_a_message_twice, "messages in the Delta table"),
        (leave_a_gap_in_the_archive, "topics without gap or repeat"),
        (change_a_payload_in_the_archive, "topics with equal checksums"),
        (lose_a_topic_of_the_archive, "topics with equal checksums"),
        (lose_a_message_of_a_window, "messages in windows"),
        (crash_at_the_end, "exit code"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_proof_finds_what_went_wrong(tamper: Callable[[Evidence], None], found_by: str) -> None:
    found = evidence()
    tamper(found)
    assert found_by in broken(found)


def test_second_invoice_and_second_delivery_are_reported_and_no_fault() -> None:
    again = msgspec.json.encode(Invoice("web-1", cents(1), 2))
    work = count_work(ORDERS, [*invoices(), again], dead_letters(), left=0)
    assert (work.invoiced, work.more_than_once, work.came_again) == (len(invoices()), 1, 1)
    found = evidence()
    found.work.more_than_once = work.more_than_once
    assert broken(found) == set()


def test_reader_counts_what_is_missing_again_and_misplaced() -> None:
    tally = ReadingTally()
    for offset, number in ((5, 5), (6, 6), (8, 8), (8, 8), (9, 10)):
        tally.take(TOPIC, offset, number)
    assert (tally.count, tally.missing, tally.again, tally.misplaced) == (4, 2, 1, 1)
    assert tally.expected({TOPIC: Sum(messages=10)}) == 6
    assert tally.has_all({TOPIC: Sum(messages=10)})
    assert not tally.has_all({TOPIC: Sum(messages=11)})


# --- The real one ---


def demo(*words: str, seconds_max: float = RUN_SECONDS_MAX) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        env=demo_environment(),
        capture_output=True,
        text=True,
        timeout=seconds_max,
        check=False,
    )


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "examples.demo", *words]


def demo_environment() -> dict[str, str]:
    return environment() | {"PYTHONPATH": str(ROOT)}


@pytest.mark.xdist_group("spark")  # one Java at a time
@pytest.mark.timeout(300)  # where much else is going on, Spark takes its time
def test_demo_survives_the_kill_of_its_broker_and_every_count_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "demo"
    picture = tmp_path / "demo.svg"
    words = ("--seconds", "4", "--rate", "1000", "--data", str(place))
    ended = demo(*words, "--picture", str(picture))
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    assert "counts agree" in ended.stdout
    assert "the broker was killed (SIGKILL)" in ended.stdout
    assert "\x1b" not in ended.stdout
    assert_self_contained(picture.read_text())
    assert_commands_work(ended.stdout)
    recount = ["--recount", "--data", str(place)]
    assert main(recount) == 0
    found = load(place)
    found.readings[TOPIC].messages += 1  # one that was acknowledged, and is nowhere
    save(found, place)
    assert main(recount) == 1
    assert "counts do not agree" in capsys.readouterr().out


def assert_self_contained(svg: str) -> None:
    """It is XML, and names no other host; the one address in it is the name of the format."""
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert set(re.findall(r"\w+://([\w.]+)", svg)) <= {"www.w3.org", "127.0.0.1"}
    assert "@import" not in svg
    assert "counts agree" in svg.replace("&#160;", " ")


def assert_commands_work(said: str) -> None:
    """The three that are printed at the end, as they are."""
    commands = re.findall(r"^  (\S+/bin/.+)$", said, re.MULTILINE)
    assert len(commands) == 3, said
    for line in commands:
        words = shlex.split(line)
        if words[0].endswith("/runnel"):
            assert run(words[1:]) == 0, line  # within this process, which is quicker
        else:
            shown = subprocess.run(words, capture_output=True, text=True, check=False)
            # pyarrow now and then aborts a process that has done everything, as it ends (apache/arrow#34314).
            is_late_abort = (
                shown.returncode == -signal.SIGABRT and "without an active" in shown.stderr
            )
            assert shown.returncode == 0 or is_late_abort, shown.stderr
            assert "window_start" in shown.stdout


def test_demo_that_is_interrupted_takes_everybody_along(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("--seconds", "60", "--data", str(tmp_path / "demo")),
        env=demo_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while "are at it" not in process.stdout.readline():
            assert process.poll() is None
        everybody = psutil.Process(process.pid).children(recursive=True)
        assert len(everybody) >= 6  # the broker, Spark, two shops and two workers
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=RUN_SECONDS_MAX)
    assert process.returncode == 128 + signal.SIGINT
    assert told.startswith("interrupted")
    _, left = psutil.wait_procs(everybody, timeout=10)
    assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--seconds", "1"), "at least 4"),
        (("--rate", "0"), "from 1 to 50,000"),
        (("--recount", "--data", "{empty}"), "no demo has ended there"),
        (("--data", "{full}"), "it is not empty, and not from an earlier demo"),
        (("--data", "{file}"), "File exists"),
    ],
)
def test_demo_says_what_it_cannot_do(words: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter.txt").write_text("dear reader")
    places = {"empty": tmp_path / "empty", "full": full, "file": full / "letter.txt"}
    ended = demo(*(word.format(**places) for word in words), seconds_max=30)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert problem in ended.stderr
    assert os.listdir(full) == ["letter.txt"]
