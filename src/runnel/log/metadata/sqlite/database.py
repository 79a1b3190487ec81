"""`ClusterDatabase`: the file `cluster.sqlite`, opened by one process: changes in groups, and what others change.

One worker has the connection. Changes that are added during one transaction share the next one. A transaction holds the
file's write lock, so it first reads what other processes have changed: every process gets all changes in the order in
which they were committed, its own among those of others.

Other processes' changes are noticed by `PRAGMA data_version`, which costs 4 µs. The loop asks for it every 50 ms, and
every 3 ms for a moment after a change, because changes come in bursts: a wish, the end of a term, the next term.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from runnel.errors import ClosedError, RunnelError, Unavailable
from runnel.log.metadata.sqlite import schema
from runnel.log.metadata.sqlite.failures import failure, is_busy
from runnel.platform.diagnostics import LogThrottle, get_logger
from runnel.platform.workers import ThreadWorkers

logger = get_logger("runnel.cluster")

BUSY_MS_MAX: Final = 5_000
"""How long a change waits for other processes before it fails as Unavailable."""

_LOOK_EVERY_S: Final = 0.050
_LOOK_SOON_S: Final = 0.003
_ATTENTIVE_S: Final = 0.250  # after a change by this or another process
_CHANGES_TOGETHER: Final = 1024
_WAL_BYTES_KEPT_MAX: Final = 16 * 2**20
_RETRY_S: Final = 0.000_2
_RETRY_S_MAX: Final = 0.005

T = TypeVar("T")
Change = Callable[[sqlite3.Connection], T]
Deliver = Callable[[], None]


class Follower(Protocol):
    """Follows a part of the file. `read` runs in the worker, in a transaction."""

    def read(self, connection: sqlite3.Connection) -> Deliver | None:
        """Read what has changed since the last time. Returns what shall be done on the loop."""
        ...


class _Waiting(msgspec.Struct, gc=False):
    """A change that waits for its transaction."""

    change: Change[Any]
    prepare: Callable[[], None] | None
    apply: Callable[[Any], None] | None
    future: asyncio.Future[Any]


class _Committed(msgspec.Struct, gc=False):
    """How a transaction ended: what others had changed before it, and each change's result or error."""

    before: list[Deliver]
    outcomes: list[Any]
    after: list[Deliver]


class ClusterDatabase:
    """One process's access to the file. Make one with `await ClusterDatabase.open(…)`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._workers = ThreadWorkers(1, name="runnel-sqlite")
        self._connected: sqlite3.Connection | None = None
        self._data_version = 0
        self._followers: list[Follower] = []
        self._queue: list[_Waiting] = []
        self._is_writing = False
        self._is_paused = False
        self._idle: asyncio.Future[None] | None = None
        self._is_closed = False
        self._is_released = False
        self._timer: asyncio.TimerHandle | None = None
        self._attentive_until = 0.0  # by the loop's clock
        self._throttle = LogThrottle()
        self.failure = ""
        """Why the file could not be read last time; "" if it could."""

    @classmethod
    async def open(cls, path: str) -> ClusterDatabase:
        """Open the file, which exists (`conversion.make`).

        CorruptionError if it is damaged, FormatVersionError if a newer Runnel has made it.
        """
        database = cls(path)
        try:
            await database._workers.submit(database._connect)
        except BaseException:
            database.release()
            raise
        database._look_later()
        return database

    def _connect(self) -> None:
        try:
            self._connected = connect(self.path)
            schema.check_version(self._connected, self.path)
        except sqlite3.Error as error:
            raise failure(error, self.path) from error

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._connected is None:
            raise ClosedError(f"{self.path} is closed")
        return self._connected

    # --- Changes ---

    def change(
        self,
        change: Change[T],
        *,
        prepare: Callable[[], None] | None = None,
        apply: Callable[[T], None] | None = None,
    ) -> asyncio.Future[T]:
        """Make a change, in a transaction that it may share with others. A RunnelError of it undoes it alone.

        `prepare` runs in the worker before the transaction. The future is done once the change is committed and
        `apply`, on the loop, has been called with its result.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if self._is_closed:
            future.set_exception(ClosedError(f"{self.path} is closed"))
            return future
        self._queue.append(_Waiting(change, prepare, apply, future))
        if not self._is_writing and not self._is_paused:
            self._begin_writing()
        return future

    def _begin_writing(self) -> None:
        self._is_writing = True
        asyncio.get_running_loop().call_soon(self._write_next)

    def _write_next(self) -> None:
        count = 0 if self._is_paused else _CHANGES_TOGETHER
        group, self._queue = self._queue[:count], self._queue[count:]
        if group and self._is_released:
            self._answer(group, [ClosedError(f"{self.path} is closed")] * len(group))
            group = []
        if not group:
            self._is_writing = False
            if self._idle is not None and not self._idle.done():
                self._idle.set_result(None)
            return
        committed = self._workers.submit(self._commit, group)
        committed.add_done_callback(lambda done: self._committed(group, done))

    def _commit(self, group: list[_Waiting]) -> _Committed:
        """Commit a group. Runs in the worker."""
        found = _Committed([], [None] * len(group), [])
        try:
            self._prepare(group, found)
            self._patiently(lambda: self._connection.execute("BEGIN IMMEDIATE"))
            try:
                found.before = self._read_followers()
                self._make(group, found)
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._fail(found, failure(error, self.path))
        except RunnelError as error:
            self._fail(found, error)
        else:
            # What state follows includes this process's own changes.
            found.after = self._look()
        return found

    def _fail(self, found: _Committed, error: RunnelError) -> None:
        found.outcomes = [
            each if isinstance(each, BaseException) else error for each in found.outcomes
        ]

    def _prepare(self, group: list[_Waiting], found: _Committed) -> None:
        for number, waiting in enumerate(group):
            if waiting.prepare is not None:
                try:
                    waiting.prepare()
                except Exception as error:  # noqa: BLE001 - it belongs to the caller
                    found.outcomes[number] = error

    def _make(self, group: list[_Waiting], found: _Committed) -> None:
        connection = self._connection
        for number, waiting in enumerate(group):
            if isinstance(found.outcomes[number], BaseException):
                continue
            connection.execute("SAVEPOINT change")
            try:
                found.outcomes[number] = waiting.change(connection)
            except sqlite3.Error:
                raise
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                connection.execute("ROLLBACK TO change")
                found.outcomes[number] = error
            connection.execute("RELEASE change")

    def _patiently(self, action: Callable[[], T]) -> T:
        """Try again while another process has the file locked.

        SQLite's own waiting lasts longer each time, so that a process among many busy ones starves.
        """
        deadline = time.monotonic() + BUSY_MS_MAX / 1_000
        pause_s = _RETRY_S
        while True:
            try:
                return action()
            except sqlite3.Error as error:
                if not is_busy(error):
                    raise
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"another process has kept {self.path} locked for {BUSY_MS_MAX / 1_000:.0f} s; try again"
                    ) from None
            time.sleep(random.uniform(0.5, 1) * pause_s)
            pause_s = min(pause_s * 1.5, _RETRY_S_MAX)

    def _committed(self, group: list[_Waiting], done: asyncio.Future[_Committed]) -> None:
        """Deliver on the loop, in the order of commits: others' changes, these, others' again."""
        error = done.exception()
        if error is not None:  # a bug must not leave callers waiting
            self._answer(group, [error] * len(group))
            self._write_next()
            raise error
        committed = done.result()
        for deliver in committed.before:
            deliver()
        self._answer(group, committed.outcomes)
        for deliver in committed.after:
            deliver()
        if committed.before or committed.after:  # something that others may answer; not a load
            self._be_attentive()
        self._write_next()

    def _answer(self, group: list[_Waiting], outcomes: Sequence[Any]) -> None:
        for waiting, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                if not waiting.future.done():
                    waiting.future.set_exception(outcome)
                    waiting.future.exception()  # marks it as retrieved: the caller need not wait for it
                continue
            if waiting.apply is not None:
                waiting.apply(outcome)
            if not waiting.future.done():
                waiting.future.set_result(outcome)

    # --- Reading ---

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Read the file as of one moment."""
        if self._is_closed:
            raise ClosedError(f"{self.path} is closed")
        return await self._workers.submit(self._read, query)

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return self._patiently(lambda: self._in_one_moment(query))
        except sqlite3.Error as error:
            raise failure(error, self.path) from error

    def _in_one_moment(self, query: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        connection.execute("BEGIN")
        try:
            return query(connection)
        finally:
            if connection.in_transaction:
                connection.execute("COMMIT")

    async def copy_to(self, path: str) -> None:
        """Write a copy of the whole file, which needs no other file beside it."""
        await self._workers.submit(self._copy, path)

    def _copy(self, path: str) -> None:
        # Not by reading the file: to close it would release the locks that this process has on it.
        try:
            with closing(sqlite3.connect(path)) as target:
                self._connection.backup(target)
                target.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error as error:
            raise failure(error, path) from error

    # --- Following ---

    def follow(self, follower: Follower) -> None:
        """Let it follow from now on."""
        self._followers.append(follower)

    def unfollow(self, follower: Follower) -> None:
        with suppress(ValueError):
            self._followers.remove(follower)

    def _read_followers(self) -> list[Deliver]:
        found = [follower.read(self._connection) for follower in list(self._followers)]
        return [deliver for deliver in found if deliver is not None]

    def _look(self) -> list[Deliver]:
        """What has changed, after a commit of this process. Runs in the worker."""
        try:
            return self._in_one_moment(lambda _: self._read_followers())
        except sqlite3.Error:
            return []  # the next look reads it, or says why it cannot

    def _look_at_others(self) -> list[Deliver]:
        """What other processes have changed. Runs in the worker."""
        try:
            [version] = self._connection.execute("PRAGMA data_version").fetchone()
            if version == self._data_version:
                return []
            found = self._in_one_moment(lambda _: self._read_followers())
        except sqlite3.Error as error:
            raise failure(error, self.path) from error
        self._data_version = version
        return found

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_closed:
            return
        loop = asyncio.get_running_loop()
        seconds = _LOOK_SOON_S if loop.time() < self._attentive_until else _LOOK_EVERY_S
        self._timer = loop.call_later(seconds, self._look_now)

    def _look_now(self) -> None:
        self._timer = None
        looked = self._workers.submit(self._look_at_others)
        looked.add_done_callback(self._looked)

    def _looked(self, done: asyncio.Future[list[Deliver]]) -> None:
        error = done.exception()
        if error is None:
            self.failure = ""
            for deliver in done.result():
                self._be_attentive()
                deliver()
        elif not self._is_closed:
            self.failure = str(error)
            if self._throttle.count(done.get_loop().time()):
                logger.warning("changes of other brokers could not be read", problem=str(error))
        if self._timer is None:
            self._look_later()

    def _be_attentive(self) -> None:
        loop = asyncio.get_running_loop()
        was_attentive = loop.time() < self._attentive_until
        self._attentive_until = loop.time() + _ATTENTIVE_S
        if not was_attentive and self._timer is not None:
            self._look_later()

    # --- Rest and end ---

    async def pause(self) -> None:
        """Finish the transaction under way, then change nothing until `resume`. Changes added meanwhile wait."""
        self._is_paused = True
        await self._wait_idle()

    async def _wait_idle(self) -> None:
        if self._is_writing:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
            self._idle = None

    def resume(self) -> None:
        """Change again."""
        self._is_paused = False
        if self._queue and not self._is_writing:
            self._begin_writing()

    async def close(self) -> None:
        """Commit what is queued, and close the file."""
        self._is_closed = True
        self.resume()
        try:
            await self._wait_idle()
        finally:
            self.release()

    def release(self) -> None:
        """Close the file without committing what is queued. May be called again. Waits for the call under way."""
        self._is_closed = self._is_released = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._followers.clear()
        with suppress(ClosedError):  # released before
            self._workers.submit(self._disconnect)
        self._workers.close()

    def _disconnect(self) -> None:
        connection, self._connected = self._connected, None
        if connection is not None:
            connection.close()


def connect(path: str, *, mode: str = "rw") -> sqlite3.Connection:
    """A connection for changes: commits survive a power loss, and damage is noticed early. Blocks."""
    connection = sqlite3.connect(
        f"file:{quote(path)}?mode={mode}",
        uri=True,
        timeout=BUSY_MS_MAX / 1_000,
        isolation_level=None,
    )
    try:
        _set_up(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_up(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")  # macOS: through the drive's own memory
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES_KEPT_MAX}")
    connection.execute("PRAGMA busy_timeout = 0")  # from now on `ClusterDatabase` waits itself
