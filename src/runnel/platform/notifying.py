"""Telling the process that started this one how far it is: systemd's notification protocol, and nothing else.

A service of `Type=notify` is started once it has said READY=1. The environment names the socket to say it to; where it
names none, nobody wants to know.
"""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Mapping
from typing import Final

from runnel.platform.diagnostics import get_logger

logger = get_logger("runnel")

_VARIABLE: Final = "NOTIFY_SOCKET"


class State(enum.Enum):
    READY = b"READY=1"
    STOPPING = b"STOPPING=1"


def notify(state: State, environment: Mapping[str, str] = os.environ) -> None:
    """Never waits and never fails: what cannot be said is warned of, and the broker serves all the same."""
    address = environment.get(_VARIABLE)
    if not address:
        return
    if address.startswith("@"):  # of Linux's abstract names, which have no file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.value, socket.MSG_DONTWAIT, address)
    except OSError as error:
        logger.warning(
            "the service manager was not told",
            state=state.name,
            address=address,
            problem=str(error),
        )
