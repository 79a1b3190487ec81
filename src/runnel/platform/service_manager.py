"""Tells systemd that the broker is ready or stopping: the sd_notify protocol, and nothing else.

systemd regards a service of `Type=notify` as started once it has sent READY=1. An environment variable names the
socket; without it there is no service manager to tell.
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


class ServiceState(enum.Enum):
    """The messages of sd_notify that Runnel sends."""

    READY = b"READY=1"
    STOPPING = b"STOPPING=1"


def notify(state: ServiceState, environment: Mapping[str, str] = os.environ) -> None:
    """Send a state. Never waits and never raises: if it cannot be sent, a warning is logged and the broker serves."""
    address = environment.get(_VARIABLE)
    if not address:
        return
    if address.startswith("@"):  # an abstract socket of Linux, which has no file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.value, socket.MSG_DONTWAIT, address)
    except OSError as error:
        logger.warning(
            "the service manager could not be notified",
            state=state.name,
            address=address,
            problem=str(error),
        )
