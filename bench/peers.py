"""Who can be compared with on this machine, who is absent, why, and how to get them."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec

from bench.measures import PEERS
from bench.systems import kafka_jars


def prepare() -> None:
    """Fetch what a peer lacks and this machine can have: Kafka's jars, once."""
    if kafka_jars.are_here() or shutil.which("java") is None or not find_spec("confluent_kafka"):
        return
    print("fetching Kafka's jars by Maven, once …", file=sys.stderr, flush=True)
    if problem := kafka_jars.fetch():
        print(f"  {problem}", file=sys.stderr, flush=True)


def lines() -> list[str]:
    """One for each peer."""
    told = []
    for system in PEERS:
        absence = system.absence()
        if absence is None:
            told.append(f"{system.NAME}: {system.version()}")
        else:
            told.append(f"{system.NAME}: ABSENT, {absence}. To have it: {system.REMEDY}")
    return told
