"""The command line of `bin/soak`: searches for bugs in one way, or in all ways, until time is up."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from random import SystemRandom
from typing import Any, Final

from tests.soak.damage import soak_damage
from tests.soak.everything import NAMES, soak_everything
from tests.soak.histories import HISTORIES, replay_history, soak_histories
from tests.soak.listeners import VANDALS, soak_listeners

DESCRIPTION = """\
Search for bugs. Every run begins with a new seed and prints it; the same seed finds the same bug again.
The exit code is 0 if no bug was found, 1 if one was, 2 if the arguments are wrong, 130 if it was interrupted."""

EXAMPLES = """\
examples:
  bin/soak all --minutes 10               all of the following, with one table at the end
  bin/soak log --seconds 600 --jobs 2     histories of the log on a disk that fails, for ten minutes
  bin/soak log --seed 4711                one history again, with its transcript
  bin/soak broker --seconds 600           histories of the broker: readers, restarts, retention
  bin/soak cluster --seconds 600          histories of several nodes: kills, pauses, moves, drains, and their clients
  bin/soak subscriptions --seconds 600    histories of acknowledged work: consumers crash, stall and nack
  bin/soak formats --seconds 60           mutated bytes for every decoder
  bin/soak damage --seconds 60            damaged files in a data directory
  bin/soak listeners --seconds 300        attacks on the listeners of a real server
  bin/soak listeners --only http --tls    on one of them, with TLS
  bin/soak spark --seconds 600            the memory of Spark's Python workers, in a stream from topics to a topic"""


# Former words of this command line, which scripts may still use.
_FORMER_WORDS: Final = {"door": "listeners", "--doors": "--only"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "bin/soak",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="{all,log,broker,cluster,subscriptions,formats,damage,listeners,spark}",
    )
    everything = commands.add_parser("all", help="all soaks, which share the time")
    everything.add_argument("--minutes", type=float, default=10.0, help="in all (%(default)s)")
    everything.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="some of them")
    everything.add_argument("--seed", type=int, help="the first seed; random without it")
    for kind in HISTORIES:
        histories = commands.add_parser(
            kind, help=f"simulated histories of the {kind} against a model"
        )
        histories.add_argument("--seconds", type=float, help="how long to look; without --seed, 60")
        histories.add_argument(
            "--seed", type=int, help="the first seed; without --seconds, the one history to replay"
        )
        histories.add_argument(
            "--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)"
        )
    formats = commands.add_parser("formats", help="hostile bytes for the formats' decoders")
    formats.add_argument("--seconds", type=float, default=60.0, help="how long (%(default)s)")
    formats.add_argument("--seed", type=int, help="the first seed; random without it")
    listeners = commands.add_parser("listeners", help="attacks on the listeners of a real server")
    listeners.add_argument(
        "--only", nargs="+", choices=VANDALS, default=tuple(VANDALS), help="some of them"
    )
    listeners.add_argument("--tls", action="store_true", help="listeners that speak TLS")
    listeners.add_argument("--seconds", type=float, default=60.0, help="how long (%(default)s)")
    listeners.add_argument("--seed", type=int, help="the first seed; random without it")
    damage = commands.add_parser("damage", help="damaged files in a data directory")
    damage.add_argument("--seconds", type=float, default=60.0, help="how long (%(default)s)")
    damage.add_argument("--seed", type=int, help="the first seed; random without it")
    spark = commands.add_parser("spark", help="a stream through Spark that must not grow")
    spark.add_argument("--seconds", type=float, default=60.0, help="how long (%(default)s)")
    spark.add_argument("--seed", type=int, help="the first seed; random without it")
    return parser


def main(arguments: list[str]) -> int:
    parser = _parser()
    chosen = parser.parse_args([_FORMER_WORDS.get(word, word) for word in arguments])
    if chosen.command == "all":
        if chosen.minutes <= 0:
            parser.error(
                f"--minutes {chosen.minutes:g} leaves no time; at least a fraction is needed"
            )
        return soak_everything(chosen.minutes * 60, _seed(chosen), chosen.only)
    if chosen.seconds is not None and chosen.seconds <= 0:
        parser.error(f"--seconds {chosen.seconds:g} leaves no time; at least a fraction is needed")
    if chosen.command == "formats":
        return _soak_formats(chosen)
    if chosen.command == "listeners":
        return soak_listeners(chosen.seconds, _seed(chosen), chosen.only, with_tls=chosen.tls)
    if chosen.command == "damage":
        return soak_damage(chosen.seconds, _seed(chosen))
    if chosen.command == "spark":
        # Imported here, because only this soak needs pyspark.
        return int(
            importlib.import_module("tests.soak.spark").soak_spark(chosen.seconds, _seed(chosen))
        )
    if chosen.jobs < 1:
        parser.error(f"--jobs {chosen.jobs} can do nothing; at least 1 is needed")
    if chosen.seconds is None and chosen.seed is not None:
        return replay_history(chosen.command, chosen.seed)
    seconds = 60.0 if chosen.seconds is None else chosen.seconds
    return soak_histories(chosen.command, seconds, _seed(chosen), chosen.jobs)


def _soak_formats(chosen: Any) -> int:
    # Imported here, because only this soak needs the packages of the fuzz set. A bug raises an error with its input.
    formats = importlib.import_module("tests.fuzz.formats")
    seed = _seed(chosen)
    print(
        f"hostile bytes for the formats from seed {seed} on, for {chosen.seconds:g} s", flush=True
    )
    print(f"{formats.run(chosen.seconds, seed):,} inputs; nothing broken")
    return 0


def _seed(chosen: Any) -> int:
    return SystemRandom().randrange(1 << 31) if chosen.seed is None else int(chosen.seed)


if __name__ == "__main__":
    # SIGTERM raises an exception, so that processes are ended and folders removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
