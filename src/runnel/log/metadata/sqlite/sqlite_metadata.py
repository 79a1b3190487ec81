"""`SqliteMetadata`: the metadata of a data directory in `cluster.sqlite`, which several logs follow.

A log registers when it loads, and from then on gets every change of the others. Changes that all registered logs have
passed are removed. One that lags by more than `CHANGES_KEPT_MAX` loses its registration: it is fenced, and has to load
again. So is a log whose node was declared dead.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final
from uuid import uuid4

from runnel.errors import FencedError, MalformedError, Unavailable
from runnel.log.metadata import records
from runnel.log.metadata.record_journal import LoadedRecords
from runnel.log.metadata.records import JournalMade, MetadataRecord, TermTaken, TopicMade
from runnel.log.metadata.shared_metadata import Apply, Follow
from runnel.log.metadata.sqlite import record_rows as rows
from runnel.log.metadata.sqlite.database import ClusterDatabase, Deliver
from runnel.log.metadata.sqlite.failures import damaged

CHANGES_KEPT_MAX: Final = 65_536
_PRUNED_EVERY: Final = 256  # changes
_TERMS_MAX: Final = 100_000  # as many as a log keeps in memory (`TermTable`)
_TERMS_PRUNED_EVERY: Final = 8_192  # changes: it sorts all terms


class SqliteMetadata:
    """One log's access. See `SharedMetadata`.

    A log that has the directory for itself uses it too, by `alone`. Neither closes the database.
    """

    def __init__(self, database: ClusterDatabase, member: str) -> None:
        self._database = database
        self._member = member
        self._life = uuid4().hex
        self._follow: Follow = lambda _: None
        self._followed = 0  # the version up to which `follow` has got all changes; the worker's
        self._noted = 0  # what the file says of it
        self._is_noting = False
        self._is_alone = False
        self._is_fenced = False
        self._is_ended = False

    @classmethod
    def alone(cls, database: ClusterDatabase) -> SqliteMetadata:
        """The access of the only log of the directory, which follows nobody."""
        metadata = cls(database, "")
        metadata._is_alone = True
        return metadata

    @property
    def member(self) -> str:
        return self._member

    # --- Loading ---

    async def load(self, follow: Follow) -> Sequence[MetadataRecord]:
        """See `SharedMetadata`. CorruptionError if a record is damaged: a log that opens alone mends what it can."""
        await self._database.change(self._register)
        found, version = await self._database.read(self._read_all)
        if found.damage:
            first = found.damage[0]
            raise damaged(
                self._database.path,
                f"{len(found.damage)} records are damaged, first: {first.problem}",
            )
        # From here on without a wait: what is followed comes behind what was loaded.
        self._followed = self._noted = version
        self._follow = follow
        self._database.follow(self)
        return found.records

    async def load_alone(self) -> LoadedRecords[MetadataRecord]:
        """Read everything, for the only log of the directory: the lives of all nodes have ended.

        CorruptionError if the file itself is damaged; records that cannot be read are damage.
        """
        await self._database.read(self._check)
        await self._database.change(_end_lives)
        found, _ = await self._database.read(self._read_all)
        return found

    def _check(self, connection: sqlite3.Connection) -> None:
        [found] = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise damaged(self._database.path, str(found))

    def _register(self, connection: sqlite3.Connection) -> None:
        # A node joins when its log is open: this is for its next life.
        connection.execute(
            "INSERT OR REPLACE INTO follower VALUES "
            "(?1, ?2, 1 + ifnull((SELECT incarnation FROM node WHERE name = ?1), 0), ?3)",
            (self._member, self._life, _newest(connection)),
        )

    def _read_all(
        self, connection: sqlite3.Connection
    ) -> tuple[LoadedRecords[MetadataRecord], int]:
        found, damage = rows.read_all(connection, self._database.path)
        return LoadedRecords(found, damage, None), _newest(connection)

    async def renew(self, snapshot: Sequence[MetadataRecord]) -> None:
        """Replace all records by these: the log has mended what was damaged."""

        def replace(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM record")
            self._write(connection, snapshot)

        await self._database.change(replace)

    # --- Following ---

    def read(self, connection: sqlite3.Connection) -> Deliver | None:
        """See `Follower`."""
        found: list[MetadataRecord] = []
        for version, content in rows.iterate(connection, self._followed, self._member):
            if version != self._followed + 1:
                self._is_fenced = True  # it was paused for so long that changes are gone
                break
            found += rows.decode(content) if content else ()
            self._followed = version
        if self._followed - self._noted > _PRUNED_EVERY and not self._is_noting:
            self._is_noting = True
            return partial(self._deliver_and_note, found)
        return partial(self._deliver, found) if found else None

    def _deliver(self, found: Sequence[MetadataRecord]) -> None:
        if not self._is_ended:
            self._follow(found)

    def _deliver_and_note(self, found: Sequence[MetadataRecord]) -> None:
        if found:
            self._deliver(found)
        noted = self._database.change(self._note)
        noted.add_done_callback(self._end_noting)

    def _note(self, connection: sqlite3.Connection) -> None:
        """Tell the others how far this log has come."""
        self._noted = self._followed
        connection.execute(
            "UPDATE follower SET followed = ? WHERE member = ? AND life = ?",
            (self._noted, self._member, self._life),
        )

    def _end_noting(self, _: asyncio.Future[None]) -> None:
        self._is_noting = False

    # --- Changes ---

    def add(
        self,
        *changed: MetadataRecord,
        apply: Apply | None = None,
        replaces: Mapping[str, bytes | None] | None = None,
    ) -> asyncio.Future[None]:
        return self._add(lambda: changed, apply, replaces or {})

    def add_made(
        self, make: Callable[[], Sequence[MetadataRecord]], apply: Apply | None = None
    ) -> asyncio.Future[None]:
        return self._add(make, apply, {})

    def _add(
        self,
        make: Callable[[], Sequence[MetadataRecord]],
        apply: Apply | None,
        replaces: Mapping[str, bytes | None],
    ) -> asyncio.Future[None]:
        made: list[MetadataRecord] = []

        def change(connection: sqlite3.Connection) -> None:
            self._check_life(connection)
            self._check_definitions(connection, replaces)
            self._write(connection, [each for each in made if self._is_news(connection, each)])

        return self._database.change(
            change,
            prepare=lambda: made.extend(make()),
            apply=None if apply is None else lambda _: apply(),
        )

    def _check_life(self, connection: sqlite3.Connection) -> None:
        if self._is_alone:
            return
        found = connection.execute(
            "SELECT life FROM follower WHERE member = ?", (self._member,)
        ).fetchone()
        if found != (self._life,) or self._is_fenced:
            raise FencedError(
                f"{self._member} was declared dead, started again elsewhere or was paused for too long; its log has to "
                "be opened anew"
            )

    def _check_definitions(
        self, connection: sqlite3.Connection, replaces: Mapping[str, bytes | None]
    ) -> None:
        for name, content in replaces.items():
            found = self._find(connection, rows.SUBSCRIPTION, name)
            known = found.content if isinstance(found, records.SubscriptionSet) else None
            if known != content:
                raise Unavailable(
                    f"another broker has changed subscription {name!r} meanwhile; try again"
                )

    def _is_news(self, connection: sqlite3.Connection, record: MetadataRecord) -> bool:
        """Whether the record says something new. Unavailable if another log has recorded something else first."""
        if isinstance(record, TopicMade):
            known = self._find(connection, rows.TOPIC, record.name)
            if not isinstance(known, TopicMade) or known.generation < record.generation:
                return True
            is_deleted = self._find(connection, rows.DELETED, record.name) is not None
            if is_deleted or known.generation > record.generation or not _is_same(known, record):
                raise Unavailable(f"topic {record.name!r} was made by another broker; try again")
            return False
        if isinstance(record, JournalMade):
            known = self._find(connection, rows.JOURNAL, record.name)
            if isinstance(known, JournalMade) and known.shards != record.shards:
                raise Unavailable(
                    f"journal {record.name!r} was made by another broker with {known.shards} shards; try again"
                )
            return known is None
        return True

    def _find(self, connection: sqlite3.Connection, kind: str, name: str) -> MetadataRecord | None:
        try:
            return rows.find(connection, kind, name)
        except MalformedError as error:
            raise damaged(
                self._database.path, f"the {kind} {name!r} cannot be read: {error}"
            ) from error

    def _write(self, connection: sqlite3.Connection, changed: Sequence[MetadataRecord]) -> None:
        if not changed:
            return
        version = _newest(connection) + 1
        rows.put(connection, version, changed)
        connection.execute(
            "INSERT INTO change VALUES (?, ?, ?)", (version, self._member, rows.encode(changed))
        )
        if version % _PRUNED_EVERY == 0:
            _prune(connection, version)
        if version % _TERMS_PRUNED_EVERY == 0:
            _prune_terms(connection)

    async def take_term(self, producer: str, term: int) -> int:
        """See `MetadataRecords`."""

        def take(connection: sqlite3.Connection) -> int:
            self._check_life(connection)
            known = self._find(connection, rows.TERM, producer)
            newest = known.term if isinstance(known, TermTaken) else -1
            taken = max(term, newest + 1)
            self._write(connection, [TermTaken(producer, taken)])
            return taken

        return await self._database.change(take)

    # --- Rest and end ---

    async def pause(self) -> None:
        await self._database.pause()

    def resume(self) -> None:
        self._database.resume()

    async def close(self, *changed: MetadataRecord) -> None:
        if changed:
            await self.add(*changed)
        if not self._is_alone and not self._is_ended:
            await self._database.change(self._unregister)
        self.release()

    def _unregister(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "DELETE FROM follower WHERE member = ? AND life = ?", (self._member, self._life)
        )

    def release(self) -> None:
        self._is_ended = True
        self._database.unfollow(self)


def forget_follower(connection: sqlite3.Connection, member: str, incarnation: int) -> None:
    """Fence the log of a node that was declared dead in this life, unless it was opened again since. For a change."""
    connection.execute(
        "DELETE FROM follower WHERE member = ? AND incarnation <= ?", (member, incarnation)
    )


def _end_lives(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM follower")
    connection.execute("DELETE FROM load")
    connection.execute("UPDATE view SET version = version + 1")
    connection.execute(
        "UPDATE node SET is_alive = 0, version = (SELECT version FROM view) WHERE is_alive"
    )
    _prune(connection, _newest(connection))


def _newest(connection: sqlite3.Connection) -> int:
    """The version of the newest change, which is never removed."""
    [version] = connection.execute("SELECT ifnull(max(version), 0) FROM change").fetchone()
    return int(version)


def _prune(connection: sqlite3.Connection, version: int) -> None:
    connection.execute("DELETE FROM follower WHERE followed < ?", (version - CHANGES_KEPT_MAX,))
    [passed] = connection.execute(
        "SELECT ifnull(min(followed), ?) FROM follower", (version,)
    ).fetchone()
    connection.execute("DELETE FROM change WHERE version <= ? AND version < ?", (passed, version))


def _prune_terms(connection: sqlite3.Connection) -> None:
    """Forget the terms that were taken first. No lower one is given out: terms are at least the wall clock's."""
    connection.execute(
        "DELETE FROM record WHERE kind = ?1 AND version < (SELECT version FROM record WHERE kind = ?1 "
        "ORDER BY version DESC LIMIT 1 OFFSET ?2)",
        (rows.TERM, _TERMS_MAX),
    )


def _is_same(one: TopicMade, other: TopicMade) -> bool:
    """Whether both say the same of where the topic's messages lie. Who has made it may differ."""
    return (one.keep, one.partitions, one.journal) == (other.keep, other.partitions, other.journal)
