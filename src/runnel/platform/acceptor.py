"""Accepts connections on a listening socket and counts them from that moment on, before the TLS handshake.

Only this module knows connections whose TLS handshake is not finished. They count towards `connections_max` like all
others, have a timeout of their own, and the oldest one is closed when a new connection needs its place.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol

from runnel.platform.diagnostics import LogThrottle, get_logger

logger = get_logger("runnel.listening")

# Connections accepted in one turn of the loop.
_ACCEPTED_PER_TURN_MAX: Final = 64
# The same for a socket that other processes accept from too: a busy process leaves connections to the others.
_ACCEPTED_PER_TURN_MAX_SHARED: Final = 1
# Handshakes that may go on although `connections_max` is reached: those clients get an error after the handshake.
_HANDSHAKES_BEYOND_MAX: Final = 64
# Pause after the system refused another connection. Meanwhile the kernel keeps new ones in its backlog.
_PAUSE_SECONDS: Final = 0.1
_OUT_OF_FILES: Final = frozenset((errno.EMFILE, errno.ENFILE))
_OUT_OF_RESOURCES: Final = _OUT_OF_FILES | {errno.ENOBUFS, errno.ENOMEM}


class RefusalCounter(Protocol):
    """Where an acceptor counts the connections that it refused."""

    connections_refused: int


class Acceptor:
    """Serves one listening socket from its creation until `close`. Made within a running loop."""

    def __init__(
        self,
        listening: socket.socket,
        new_connection: Callable[[], asyncio.BaseProtocol],
        *,
        section: str,
        connection_count: Callable[[], int],
        connections_max: int,
        counters: RefusalCounter,
        tls: ssl.SSLContext | None,
        handshake_seconds_max: float,
        is_shared: bool = False,
    ) -> None:
        """`connection_count` counts connections after their handshake; `section` names the settings' section.

        `is_shared`: other processes accept from this socket too.
        """
        self._listening = listening
        self._new_connection = new_connection
        self._section = section
        self._connection_count = connection_count
        self._connections_max = connections_max
        self._counters = counters
        self._tls = tls
        self._handshake_seconds_max = handshake_seconds_max
        self._per_turn_max = _ACCEPTED_PER_TURN_MAX_SHARED if is_shared else _ACCEPTED_PER_TURN_MAX
        self._loop = asyncio.get_running_loop()
        # Connections not yet handed to their protocol, oldest first. Without TLS that takes one turn of the loop.
        self._beginning: dict[asyncio.Task[None], None] = {}
        self._resuming: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._throttle = LogThrottle()
        self._loop.add_reader(listening, self._accept)

    @property
    def handshake_count(self) -> int:
        """Connections that are accepted and not yet handed to their protocol."""
        return len(self._beginning)

    def close(self) -> None:
        """Accept no more connections. Handshakes under way continue."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._resuming is None:
            self._loop.remove_reader(self._listening)
        else:
            self._resuming.cancel()
        self._listening.close()

    async def abort(self) -> None:
        """Close, and end the handshakes that are under way."""
        self.close()
        beginning = list(self._beginning)
        for task in beginning:
            task.cancel()
        if beginning:
            await asyncio.wait(beginning)

    def _accept(self) -> None:
        for _ in range(self._per_turn_max):
            try:
                accepted, _ = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:  # the client left before it was accepted
                continue
            except OSError as error:
                if error.errno not in _OUT_OF_RESOURCES:
                    raise
                self._pause(error)
                return
            accepted.settimeout(0)
            self._begin(accepted)

    def _pause(self, error: OSError) -> None:
        """Stop accepting for a moment: the loop would spin on a socket that stays readable."""
        self._loop.remove_reader(self._listening)
        self._resuming = self._loop.call_later(_PAUSE_SECONDS, self._resume)
        if times := self._throttle.count(self._loop.time()):
            advice = "; raise the limit of open files (ulimit -n)"
            logger.error(
                "no connection can be accepted for now; new connections have to wait"
                + (advice if error.errno in _OUT_OF_FILES else ""),
                listener=self._section,
                problem=error.strerror,
                times=times,
            )

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listening, self._accept)
        self._accept()

    def _begin(self, accepted: socket.socket) -> None:
        if self._tls is not None:
            places = self._connections_max - self._connection_count()
            if len(self._beginning) >= max(places, _HANDSHAKES_BEYOND_MAX):
                self._end_oldest()
        task = self._loop.create_task(self._hand_over(accepted))
        self._beginning[task] = None
        task.add_done_callback(self._ended)

    def _end_oldest(self) -> None:
        oldest = next(iter(self._beginning))
        del self._beginning[oldest]
        oldest.cancel()
        self._counters.connections_refused += 1

    async def _hand_over(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._new_connection,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._handshake_seconds_max,
            )
        except OSError:  # includes ssl.SSLError and TimeoutError: the handshake failed
            accepted.close()
        except BaseException:
            accepted.close()
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._beginning.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection could not be set up", listener=self._section, exc_info=error)
