"""`bin/bench NAME [--quick] [--json FILE]`: run one benchmark, print a table, write JSON on request."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from bench.report import as_json, machine_facts, print_table

_NAMES = ("log",)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bin/bench", description=__doc__)
    parser.add_argument("name", choices=_NAMES, help="which benchmark")
    parser.add_argument("--quick", action="store_true", help="less data: under 40 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--only", metavar="TEXT", default="", help="only parts whose name has this")
    chosen = parser.parse_args()
    module = importlib.import_module(f"bench.{chosen.name}")
    results = []
    for title, part in module.PARTS:
        if chosen.only not in title:
            continue
        print(f"… {title}", file=sys.stderr, flush=True)
        results += part(quick=chosen.quick)
    facts = machine_facts()
    print_table(f"{chosen.name}{' (quick)' if chosen.quick else ''}", facts, results)
    if chosen.json is not None:
        chosen.json.write_bytes(as_json(chosen.name, facts, results, quick=chosen.quick))
    return 0


if __name__ == "__main__":
    sys.exit(main())
