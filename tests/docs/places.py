"""Documented ports and paths, and where they are for one reader: free ports, and his own directory."""

from __future__ import annotations

import re
import secrets
import socket
from pathlib import Path
from typing import Final

# 7470 native, 7480 HTTP, 7490 gRPC; 7471 and so on are those of a second broker.
_PORT: Final = re.compile(r"\b74[789]\d\b")
_PATH: Final = re.compile(r"(?<![\w./-])(/var/lib/runnel|/etc/runnel|/backup|/srv)\b")
# Java has another working directory than a reader: what it is told needs a whole path.
_OF_SPARK: Final = re.compile(r"\b(?=checkpoints/|tables/|runnel-data\")")
# Below what systems hand out by themselves, so that no test beside this one is given it meanwhile.
_FREE_PORTS: Final = range(11_000, 31_000)


class Places:
    """Translates what is to be run, and what it printed back."""

    def __init__(self, directory: Path, *, is_with_spark: bool = False) -> None:
        self._directory = directory
        self._is_with_spark = is_with_spark
        self._ports: dict[str, int] = {}

    def port(self, documented: int | str) -> int:
        """The free port that stands for a documented one."""
        if str(documented) not in self._ports:
            self._ports[str(documented)] = _free_port()
        return self._ports[str(documented)]

    def real(self, text: str) -> str:
        text = _PORT.sub(lambda found: str(self.port(found[0])), text)
        text = _PATH.sub(lambda found: f"{self._directory}{found[0]}", text)
        return _OF_SPARK.sub(f"{self._directory}/", text) if self._is_with_spark else text

    def documented(self, text: str) -> str:
        for documented, port in self._ports.items():
            text = re.sub(rf"\b{port}\b", documented, text)
        text = text.replace(f"{self._directory}/", "/")
        # Of a path that was relative on the page nothing is left of the directory, not even a slash.
        return re.sub(r"/(?=checkpoints/|tables/|runnel-data\")", "", text)


def _free_port() -> int:
    while True:
        port = secrets.choice(_FREE_PORTS)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
