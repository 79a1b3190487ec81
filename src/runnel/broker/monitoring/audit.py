"""The audit trail: changes and denied requests by token, as messages on `!system/audit` and as log lines.

Every change is recorded. Denials are recorded up to a limit per token and second, and the others are counted: a client
that repeats a denied request forever fills neither the topic nor the log.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from runnel.broker.monitoring.events import Publish
from runnel.errors import RunnelError
from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger
from runnel.security.authenticator import TokenChange

AUDIT_TOPIC: Final = "!system/audit"

_WINDOW_NS: Final = 1_000_000_000
_DENIALS_MAX: Final = 10
# Denials of this many tokens in a second are counted separately; further tokens are counted as one.
_TOKENS_MAX: Final = 1000

logger = get_logger("runnel.audit")


class AuditKind(enum.StrEnum):
    """The kind of a record. The subject is the thing that was changed; for a denial, the verb."""

    DENIED = "denied"
    TOPIC_DELETED = "topic_deleted"
    TOPIC_PURGED = "topic_purged"
    CURSOR_MOVED = "cursor_moved"
    CURSOR_REMOVED = "cursor_removed"
    SUBSCRIPTION_DELETED = "subscription_deleted"
    SUBSCRIPTION_MOVED = "subscription_moved"
    SUBSCRIPTION_PAUSED = "subscription_paused"
    SUBSCRIPTION_RESUMED = "subscription_resumed"
    MEMBER_REMOVED = "member_removed"
    DEAD_LETTERS_REDRIVEN = "dead_letters_redriven"
    DEAD_LETTERS_DROPPED = "dead_letters_dropped"
    SHARD_MOVED = "shard_moved"
    NODE_DRAINED = "node_drained"
    CLUSTER_BALANCED = "cluster_balanced"
    TOKEN_ADDED = "token_added"
    TOKEN_CHANGED = "token_changed"
    TOKEN_REVOKED = "token_revoked"


_LINES: Final[Mapping[AuditKind, str]] = {
    AuditKind.DENIED: "a request was denied",
    AuditKind.TOPIC_DELETED: "topic deleted",
    AuditKind.TOPIC_PURGED: "topic purged",
    AuditKind.CURSOR_MOVED: "cursor moved back",
    AuditKind.CURSOR_REMOVED: "cursor removed",
    AuditKind.SUBSCRIPTION_DELETED: "subscription deleted",
    AuditKind.SUBSCRIPTION_MOVED: "subscription moved",
    AuditKind.SUBSCRIPTION_PAUSED: "subscription paused",
    AuditKind.SUBSCRIPTION_RESUMED: "subscription resumed",
    AuditKind.MEMBER_REMOVED: "member of a subscription removed",
    AuditKind.DEAD_LETTERS_REDRIVEN: "dead letters sent back",
    AuditKind.DEAD_LETTERS_DROPPED: "dead letters dropped",
    AuditKind.SHARD_MOVED: "a shard shall move to another node",
    AuditKind.NODE_DRAINED: "a node shall give up its shards, or take some again",
    AuditKind.CLUSTER_BALANCED: "shards shall move so that loads are even",
    AuditKind.TOKEN_ADDED: "token added",
    AuditKind.TOKEN_CHANGED: "token changed",
    AuditKind.TOKEN_REVOKED: "token revoked",
}


class _Denials:
    """The denials of one token in one second."""

    __slots__ = ("began_ns", "left_out", "recorded")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.recorded = 0
        self.left_out = 0


class Audit:
    """Writes the audit trail."""

    def __init__(self, clock: Clock, publish: Publish) -> None:
        self.node = ""
        """The name of this node, if there are several: it stands in each record."""
        self._clock = clock
        self._publish = publish
        self._denials: dict[str, _Denials] = {}
        self.denied_count = 0
        """Denials since the broker started, recorded or left out."""

    def record(
        self, kind: AuditKind, subject: str, *, token: str, peer: str = "", **fields: object
    ) -> None:
        """Record a change. An empty token: the broker asks for none."""
        self._write(kind, {"subject": subject, "token": token, "peer": peer, **fields})

    def token_changed(self, change: TokenChange, name: str) -> None:
        """Record a change of a token, for the authenticator. The change is made in the token file, not with a token."""
        self.record(AuditKind(f"token_{change}"), name, token="")

    def deny(self, verb: str, problem: str, *, token: str, peer: str = "") -> None:
        """Record a verb that the token has no right to."""
        self.denied_count += 1
        now_ns = self._clock.monotonic_ns()
        key = token if token in self._denials or len(self._denials) < _TOKENS_MAX else ""
        denials = self._denials.get(key)
        if denials is None or now_ns - denials.began_ns >= _WINDOW_NS:
            if denials is not None:
                self._sum_up(key, denials)
            denials = self._denials[key] = _Denials(now_ns)
        if denials.recorded >= _DENIALS_MAX:
            denials.left_out += 1
            return
        denials.recorded += 1
        self._write(
            AuditKind.DENIED,
            {"subject": verb, "token": token, "peer": peer, "problem": problem},
        )

    def flush(self) -> None:
        """Record how many denials were left out in seconds that are over."""
        now_ns = self._clock.monotonic_ns()
        over = [
            token
            for token, denials in self._denials.items()
            if now_ns - denials.began_ns >= _WINDOW_NS
        ]
        for token in over:
            self._sum_up(token, self._denials.pop(token))

    def _sum_up(self, token: str, denials: _Denials) -> None:
        if denials.left_out:
            self._write(
                AuditKind.DENIED,
                {"subject": "", "token": token, "peer": "", "left_out": denials.left_out},
            )

    def _write(self, kind: AuditKind, fields: Mapping[str, Any]) -> None:
        level = logging.WARNING if kind is AuditKind.DENIED else logging.INFO
        logger.log(level, _LINES[kind], kind=kind.value, **fields)
        document = {"kind": kind.value, "time_ns": self._clock.time_ns(), **fields}
        if self.node:
            document["node"] = self.node
        try:
            self._publish(AUDIT_TOPIC, msgspec.json.encode(document), {"kind": kind.value})
        except RunnelError as error:
            logger.warning(
                "an audit record could not be published", kind=kind.value, error=str(error)
            )
