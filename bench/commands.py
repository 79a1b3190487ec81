"""Measure: everything side by side, or one benchmark.

bin/bench                 all of it, job by job; results, charts and docs/performance.md are brought up to date
bin/bench --quick         the same with less data and fewer rounds: some minutes, and nothing goes into the docs
bin/bench --missing       only what the last run of everything lacks: after an interrupt, or for parts that failed
bin/bench all --only TEXT only the parts in whose name or benchmark's name that is; the others' results stay
bin/bench NAME            one benchmark, its table alone; --page keeps its results and puts them into the docs
bin/bench report          tables, charts and docs anew from what was measured
bin/bench peers           who is there to be compared with, and how to get the others
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from bench import page, peers, record
from bench.record import FOLDER, QUICK_FOLDER
from bench.report import as_json, print_table
from bench.runner import run_jobs, run_parts, say
from bench.suite import NAMES, Job, jobs_of, titles_of
from bench.targets import verdicts

_PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
_FORMER_NAMES = {"listeners": "listeners"}
_ALL, _REPORT, _PEERS = "all", "report", "peers"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bin/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (_ALL, *NAMES, _REPORT, _PEERS)
    parser.add_argument(
        "name",
        choices=names,
        type=lambda name: _FORMER_NAMES.get(name, name),
        nargs="?",
        default=_ALL,
        help="what to run",
    )
    parser.add_argument("--quick", action="store_true", help="less data, fewer rounds")
    parser.add_argument("--only", metavar="TEXT", default="", help="only parts whose name has this")
    parser.add_argument(
        "--missing", action="store_true", help="only parts that the last run of everything lacks"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument(
        "--page",
        action=argparse.BooleanOptionalAction,
        help="put what was measured into docs/performance.md (a full run of everything does)",
    )
    # What a run of everything tells the processes of its jobs.
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", action="append", default=[], help=argparse.SUPPRESS)
    return parser


def main() -> int:
    parser = _arguments()
    chosen = parser.parse_args()
    folder = QUICK_FOLDER if chosen.quick else FOLDER
    if chosen.record is not None:
        return (
            1
            if run_parts(
                chosen.name, chosen.part, quick=chosen.quick, folder=chosen.record
            ).failures
            else 0
        )
    if chosen.name == _REPORT:
        _publish(folder, into_page=chosen.page if chosen.page is not None else not chosen.quick)
        return 0
    peers.prepare()
    if chosen.name == _PEERS:
        print("\n".join(peers.lines()))
        return 0
    if chosen.name == _ALL:
        if chosen.json is not None:
            parser.error(f"--json goes with one benchmark; the results are in {folder}")
        into_page = chosen.page if chosen.page is not None else not chosen.quick
        return _run_all(parser, chosen, folder, into_page=into_page)
    return _run_one(parser, chosen, folder)


# --- Everything ---


def _run_all(
    parser: argparse.ArgumentParser, chosen: argparse.Namespace, folder: Path, *, into_page: bool
) -> int:
    jobs, failures = _jobs(chosen, folder)
    if not jobs and not failures:
        if chosen.missing:
            say("nothing is missing")
            _publish(folder, into_page=into_page)
            return 0
        parser.error(f"--only {chosen.only}: no part and no benchmark has this in its name")
    for line in peers.lines():
        say(line)
    seconds = sum(job.seconds(quick=chosen.quick) for job in jobs)
    count = sum(len(job.titles) for job in jobs)
    say(f"{count} parts, about {seconds / 60:.0f} minutes; results in {folder}")
    if not chosen.only and not chosen.missing:
        record.begin_run(folder)
    try:
        failures += run_jobs(jobs, folder, quick=chosen.quick)
    except KeyboardInterrupt:
        say("interrupted; what was done is kept, and bin/bench --missing does the rest")
        raise
    _publish(folder, into_page=into_page)
    for failure in failures:
        say(f"FAILED: {failure}")
    return 1 if failures else 0


def _jobs(chosen: argparse.Namespace, folder: Path) -> tuple[list[Job], list[str]]:
    """What is to be done, and the benchmarks that cannot even be loaded."""
    jobs, failures = [], []
    for name in NAMES:
        try:
            titles: Sequence[str] = titles_of(name)
        except ImportError as error:
            failures.append(f"{name}: {error}")
            continue
        if chosen.only and chosen.only not in name:
            titles = [title for title in titles if chosen.only in title]
        if chosen.missing:
            known = record.read(folder, name)
            titles = [title for title in titles if record.is_missing(folder, known.get(title))]
        jobs += jobs_of(name, titles)
    return jobs, failures


def _publish(folder: Path, *, into_page: bool) -> None:
    """Table and charts beside the results; and all of it into the docs."""
    records = {name: record.read(folder, name) for name in NAMES}
    from bench.charts import draw  # matplotlib takes a second

    drawn = draw(records, folder)
    (folder / "results.md").write_text(
        page.whole(records, page.charts(folder, folder / "results.md", drawn))
    )
    say(f"written: {folder / 'results.md'} and {len(drawn)} charts")
    for verdict in verdicts({name: record.results_of(parts) for name, parts in records.items()}):
        is_run = records[verdict.wanted.name]
        if verdict.is_met is None and is_run and not any(not r.is_good for r in is_run.values()):
            say(f"no result for the target {verdict.wanted.what!r} ({verdict.wanted.pattern})")
    if not into_page:
        return
    page.put_into(_PAGE, "charts", page.charts(folder, _PAGE, drawn))
    page.put_into(_PAGE, "side by side", page.side_by_side(records))
    page.put_into(_PAGE, "targets", page.targets(records))
    for name, parts in records.items():
        if parts:
            page.put_into(_PAGE, name, page.table(parts))
    say(f"written: {_PAGE}")


# --- One benchmark ---


def _run_one(parser: argparse.ArgumentParser, chosen: argparse.Namespace, folder: Path) -> int:
    titles = [title for title in titles_of(chosen.name) if chosen.only in title]
    if not titles:
        known = ", ".join(repr(title) for title in titles_of(chosen.name))
        parser.error(f"--only {chosen.only}: no part has this in its name; there are {known}")
    # bin/bench changes to the repository's root; a relative path is the caller's.
    target = chosen.json and Path(os.environ.get("BENCH_CALLED_FROM", "."), chosen.json)
    if target is not None and (problem := _unwritable(target)):
        parser.error(f"--json {chosen.json}: {problem}")
    kept = folder if chosen.page else None
    found = run_parts(chosen.name, titles, quick=chosen.quick, folder=kept)
    print_table(f"{chosen.name}{' (quick)' if chosen.quick else ''}", found.facts, found.results)
    if target is not None:
        target.write_bytes(as_json(chosen.name, found.facts, found.results, quick=chosen.quick))
    if chosen.page:
        _publish(folder, into_page=True)
    return 1 if found.failures else 0


def _unwritable(target: Path) -> str | None:
    """Known before the run, not after it."""
    if target.is_dir():
        return "it is a directory"
    if not target.parent.is_dir():
        return f"there is no directory {target.parent}"
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        return "it cannot be written to"
    return None
