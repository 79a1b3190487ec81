"""A parent whose children are `fake_child.py`. The first word names the file of deeds, the second one a directory."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runnel.config import (
    ClusterSettings,
    GrpcSettings,
    HttpSettings,
    LogLevel,
    NativeSettings,
    Settings,
)
from runnel.errors import RunnelError
from runnel.processes import parent
from runnel.processes.supervisor import SupervisionRules

SILENCE_NS_MAX = 1_000_000_000


class _Directory:
    """A directory without files that says who is declared dead."""

    recovered: Sequence[str] = ()

    def life_of(self, name: str) -> int | None:
        _say(f"life of {name}")
        return None

    async def declare_dead(self, name: str, incarnation: int) -> None:
        _say(f"dead {name} {incarnation}")

    async def close(self) -> None:
        _say("closed")


def _say(text: str) -> None:
    os.write(2, f"parent {os.getpid()} {text}\n".encode())


def main() -> int:
    deeds, count = sys.argv[1], int(sys.argv[2])
    settings = Settings(
        cluster=ClusterSettings(processes=count),
        native=NativeSettings(listen="127.0.0.1:0"),
        http=HttpSettings(listen=None),
        grpc=GrpcSettings(listen=None),
    )

    def announce(addresses: Mapping[str, str], found: Sequence[str]) -> None:
        assert list(found) == []
        print("listening on", *addresses.values(), flush=True)

    async def open_directory(_: Settings) -> _Directory:
        return _Directory()

    def load_again() -> Settings:
        return Settings(log_level=LogLevel.DEBUG)

    setup = parent.ParentSetup(
        settings=settings,
        count=count,
        command=(sys.executable, str(Path(__file__).with_name("fake_child.py")), deeds),
        log_format="text",
        load=load_again,
        set_log_level=lambda level: _say(f"level {level}"),
        announce=announce,
        open_directory=open_directory,
        rules=SupervisionRules(silence_ns_max=SILENCE_NS_MAX),
    )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="log %(message)s")
    try:
        return parent.run_parent(setup)
    except RunnelError as error:
        _say(f"failed {type(error).__name__}: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
