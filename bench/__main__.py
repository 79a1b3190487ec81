"""`bin/bench NAME [--quick] [--json FILE]`: run one benchmark, print a table, write JSON on request."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

from bench.report import as_json, as_markdown, machine_facts, print_table, put_into_page

_NAMES = ("doors", "live", "log", "queue", "spark")
_PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bin/bench", description=__doc__)
    parser.add_argument("name", choices=_NAMES, help="which benchmark")
    parser.add_argument("--quick", action="store_true", help="less data, fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument(
        "--page", action="store_true", help="put the table into docs/performance.md"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only parts whose name has this")
    chosen = parser.parse_args()
    module = importlib.import_module(f"bench.{chosen.name}")
    parts = [(title, part) for title, part in module.PARTS if chosen.only in title]
    if not parts:
        titles = ", ".join(repr(title) for title, _ in module.PARTS)
        parser.error(f"--only {chosen.only}: no part has this in its name; there are {titles}")
    # bin/bench changes to the repository's root; a relative path is the caller's.
    target = chosen.json and Path(os.environ.get("BENCH_CALLED_FROM", "."), chosen.json)
    if target is not None and (problem := _unwritable(target)):
        parser.error(f"--json {chosen.json}: {problem}")
    results = []
    with getattr(module, "setting", nullcontext)():  # what its parts share
        for title, part in parts:
            print(f"… {title}", file=sys.stderr, flush=True)
            results += part(quick=chosen.quick)
    facts = machine_facts() | getattr(module, "more_facts", dict)()
    print_table(f"{chosen.name}{' (quick)' if chosen.quick else ''}", facts, results)
    if target is not None:
        target.write_bytes(as_json(chosen.name, facts, results, quick=chosen.quick))
    if chosen.page:
        put_into_page(_PAGE, chosen.name, as_markdown(facts, results))
    return 0


def _unwritable(target: Path) -> str | None:
    """Known before the run, not after it."""
    if target.is_dir():
        return "it is a directory"
    if not target.parent.is_dir():
        return f"there is no directory {target.parent}"
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        return "it cannot be written to"
    return None


if __name__ == "__main__":
    # As an exception, so that what was made is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
