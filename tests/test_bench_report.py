"""What `bin/bench` keeps and shows: results merged part by part, side by side, every target judged, pages."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from bench import page, record, targets
from bench.contest import Contender, Sample, Standing, compared, contest, highest, lowest
from bench.processes import RoleError
from bench.record import PartRecord
from bench.report import Measured, Result, from_row

TITLES = ("first", "second", "third")


def part(
    title: str, *results: Result, at: str = "2026-01-02T03:04:05+00:00", failure: str = ""
) -> PartRecord:
    return PartRecord(title, at, 1.0, False, {"cores": "2"}, results, failure)


def against(
    peer: str, value: float, baseline: float, *, what: str = "1 to 1", target: float | None = None
) -> Result:
    ours = Measured("Runnel", (value * 0.9, value, value * 1.1))
    theirs = Measured(peer, (baseline * 0.9, baseline, baseline * 1.1))
    return Result(
        f"{what}, against {peer}",
        value,
        "messages/s",
        baseline,
        target,
        what=what,
        ours=ours,
        peer=theirs,
    )


# --- Records ---


def test_a_part_takes_the_place_of_its_last_result_and_leaves_the_others(tmp_path: Path) -> None:
    record.keep(tmp_path, "live", part("second", against("NATS", 8, 1)), TITLES)
    record.keep(tmp_path, "live", part("first", against("NATS", 2, 1)), TITLES)
    record.keep(tmp_path, "live", part("second", against("NATS", 9, 1)), TITLES)
    parts = record.read(tmp_path, "live")
    assert list(parts) == ["first", "second"]
    assert [result.ratio for result in record.results_of(parts)] == [2, 9]


def test_what_is_read_back_is_what_was_kept(tmp_path: Path) -> None:
    kept = part("first", against("NATS", 8, 1, target=10))
    record.keep(tmp_path, "live", kept, TITLES)
    assert record.read(tmp_path, "live") == {"first": kept}


def test_a_result_without_a_good_run_is_as_far_from_its_target_when_read_back(
    tmp_path: Path,
) -> None:
    nothing = Result("latency", math.inf, "µs", 100.0, 1.5, is_at_most=True)
    record.keep(tmp_path, "latency", part("first", nothing), TITLES)
    (read,) = record.results_of(record.read(tmp_path, "latency"))
    assert read.value == math.inf
    assert read.met is False


def test_a_failure_keeps_the_result_before_it_and_is_reported(tmp_path: Path) -> None:
    record.keep(tmp_path, "live", part("first", against("NATS", 8, 1)), TITLES)
    record.keep(tmp_path, "live", part("first", failure="RoleError: no luck"), TITLES)
    parts = record.read(tmp_path, "live")
    assert record.results_of(parts)[0].ratio == 8
    assert "**first failed** in its last run: RoleError: no luck" in page.table(parts)


def test_missing_is_what_is_absent_failed_or_older_than_the_last_whole_run(tmp_path: Path) -> None:
    assert record.is_missing(tmp_path, None)
    assert record.is_missing(tmp_path, part("first", failure="no luck"))
    assert not record.is_missing(tmp_path, part("first"))  # there was no whole run yet
    record.begin_run(tmp_path)
    assert record.is_missing(tmp_path, part("first"))
    assert not record.is_missing(tmp_path, part("first", at=record.now()))


def test_rows_have_what_follows_from_them(tmp_path: Path) -> None:
    record.keep(tmp_path, "live", part("first", against("NATS", 8, 2, target=3)), TITLES)
    document = msgspec.json.decode((tmp_path / "live.json").read_bytes())
    (row,) = document["parts"][0]["results"]
    assert (row["ratio"], row["met"]) == (4, True)
    assert from_row(row) == against("NATS", 8, 2, target=3)


# --- Contests ---


def test_systems_take_turns_and_the_run_before_them_is_not_counted() -> None:
    runs: list[str] = []

    def running(name: str) -> Contender:
        def measure() -> Sample:
            runs.append(name)
            return Sample((float(len(runs)),))

        return Contender(name, measure, is_warmed=name == "b")

    standings = contest([running("a"), running("b")], 2)
    assert runs == ["b", "a", "b", "a", "b"]
    assert standings["b"].figures() == [3, 5]


def test_a_run_with_trouble_is_reported_and_not_counted() -> None:
    samples = iter([Sample((1.0,)), Sample((100.0,), "2 of 3 messages"), Sample((3.0,))])
    standing = contest([Contender("a", lambda: next(samples))], 3)["a"]
    measured = standing.measured()
    assert measured.figures == (1.0, 3.0)
    assert measured.trouble == "1 of 3 runs NOT COUNTED: 2 of 3 messages"


def test_a_role_that_fails_is_a_run_with_trouble() -> None:
    def fail() -> Sample:
        raise RoleError("nothing heard")

    standing = contest([Contender("a", fail)], 1)["a"]
    assert standing.median() is None
    assert "nothing heard" in standing.measured().trouble


def test_without_a_figure_of_the_peer_nothing_is_judged() -> None:
    ours, peer = Standing("Runnel", [Sample((1.0,))]), Standing("Kafka", (), "no java")
    result = compared("1 to 1", "messages/s", ours, peer, target=3)
    assert result.met is None
    assert "Kafka absent: no java" in result.told()


def test_the_best_peer_is_the_lowest_or_the_highest_of_those_measured() -> None:
    standings = {
        "absent": Standing("absent", (), "no server"),
        "slow": Standing("slow", [Sample((1.0,))]),
        "quick": Standing("quick", [Sample((9.0,))]),
    }
    assert highest(standings, list(standings)).name == "quick"
    assert lowest(standings, list(standings)).name == "slow"
    assert lowest(standings, ["absent"]).name == "absent"


# --- Side by side ---


def test_variants_of_a_system_share_its_column() -> None:
    what = "publishing to disk, acknowledged as stored"
    parts = {
        "stored": part(
            "stored",
            against("JetStream", 2_000_000, 50_000, what=what),
            against("JetStream with sync always", 2_000_000, 5000, what=what),
            against("Kafka with flush.messages=1", 2_000_000, 500_000, what=what),
        )
    }
    heading, _, row = page.side_by_side({"live": parts}).splitlines()
    assert heading == "| | Runnel | NATS | Redis | RabbitMQ | Kafka |"
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[2] == "**2 M** (1.8 M to 2.2 M)"
    assert (
        cells[3]
        == "JetStream: **50 k** (45 k to 55 k)<br>JetStream, sync always: **5 k** (4.5 k to 5.5 k)"
    )
    assert cells[4] == ""
    assert cells[6] == "Kafka, flush.messages=1: **500 k** (450 k to 550 k)"


def test_our_own_modes_are_no_peers() -> None:
    parts = {"work": part("work", against("shared", 1, 3, what="key_shared"))}
    assert len(page.side_by_side({"queue": parts}).splitlines()) == 2


# --- Targets ---


def test_every_target_is_listed_met_not_met_or_not_measured() -> None:
    parts = {
        "one to one": part("one to one", against("NATS", 9, 1, what="1 to 1, ephemeral, 100 bytes"))
    }
    text = page.targets({"live": parts})
    rows = text.splitlines()
    assert rows[0] == f"1 met, 1 not met, {len(targets.WANTED) - 2} not measured."
    assert "| live | 1 to 1, against NATS with nats-py | ≥ 8 | 9 | met |" in rows
    assert "| live | 1 to 1, against NATS with nats-py (aim) | ≥ 10 | 9 | **not met** |" in rows
    assert len(rows) == len(targets.WANTED) + 4


def test_a_target_of_several_sizes_needs_all_of_them() -> None:
    grown = [
        Result(
            f"a busy topic on disk, {size} topics, against no other topic", value, "messages/s", 1.0
        )
        for size, value in (("1,000", 0.9), ("100,000", 0.5))
    ]
    judged = targets.verdicts({"growth": grown})
    (verdict,) = [each for each in judged if each.is_met is not None]
    assert (verdict.measured, verdict.is_met) == ("0.9, 0.5", False)


def test_the_best_peer_of_work_is_not_kafka_nor_our_own_mode() -> None:
    name = "publish, deliver, acknowledge, 1 to 4, key_shared"
    results = [
        against("Kafka", 1, 10, what=name),
        against("shared", 4, 10, what=name),
        against("Redis Streams", 3, 1, what=name),
    ]
    judged = {
        verdict.wanted.bound: verdict.measured
        for verdict in targets.verdicts({"queue": results})
        if verdict.is_met is not None
    }
    assert judged == {2: "3", 1 / 3: "0.4"}


def test_how_far_a_target_is_passed_counts_the_worst_and_turns_round_what_must_be_low() -> None:
    results = {
        "log": [
            Result("read, bytes, checksums verified, 1 MiB reads", 1.0, "MB/s", 1.0),
            Result("read, bytes, checksums verified, 4 MiB reads", 0.25, "MB/s", 1.0),
            Result("encode a message object", 125.0, "ns", is_at_most=True),
        ]
    }
    assert [factor for _, factor in targets.factors(results)] == [0.5, 2.0]


# --- Pages ---


def test_only_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    shown = tmp_path / "page.md"
    shown.write_text("before\n<!-- live: begin -->\nold\n<!-- live: end -->\nafter\n")
    page.put_into(shown, "live", "new")
    assert shown.read_text() == "before\n<!-- live: begin -->\nnew\n<!-- live: end -->\nafter\n"


def test_a_page_without_the_marks_is_left_alone_and_named(tmp_path: Path) -> None:
    shown = tmp_path / "page.md"
    shown.write_text("text\n")
    with pytest.raises(page.NoPlace, match="live: begin"):
        page.put_into(shown, "live", "new")
    assert shown.read_text() == "text\n"


def test_the_page_has_a_place_for_everything_that_is_put_there() -> None:
    text = (Path(__file__).parent.parent / "docs" / "performance.md").read_text()
    names = ("charts", "side by side", "targets", "live", "latency", "reading", "queue", "growth")
    for name in (*names, "restart", "listeners", "log", "cores", "spark"):
        assert f"<!-- {name}: begin -->\n" in text
        assert f"\n<!-- {name}: end -->" in text


def test_charts_are_linked_from_where_the_page_is(tmp_path: Path) -> None:
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    (folder / "latency.png").touch()
    captions = {"latency": "Latency", "growth": "Growth"}
    links = page.charts(folder, tmp_path / "docs" / "performance.md", captions)
    assert links == "![Latency](../bench/results/latency.png)"
    assert page.charts(folder, folder / "results.md", captions) == "![Latency](./latency.png)"


def test_a_quick_run_is_labelled() -> None:
    quick = msgspec.structs.replace(part("first", against("NATS", 8, 1)), is_quick=True)
    assert "a quick run" in page.table({"first": quick})
