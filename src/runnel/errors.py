"""All errors that callers may get, grouped by whose fault they are and whether to retry.

Listeners map these to their protocol's answers by `code`; a published code never changes its meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar


class RunnelError(Exception):
    """The base of all errors: `str(error)` says what went wrong, `code` is a stable word for programs."""

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False


# --- The caller's fault: the same request would fail again. ---


class ClientFault(RunnelError):
    """The request is wrong as it stands; the text says what would be right."""

    code = "bad_request"


class MalformedError(ClientFault):
    """Bytes that do not follow the format. `place` names the field, or the byte, that broke it."""

    code = "malformed"

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")
        self.place = place
        self.problem = problem

    def __reduce__(self) -> tuple[type[MalformedError], tuple[str, str]]:
        return (type(self), (self.place, self.problem))


class InvalidNameError(ClientFault):
    """A topic, pattern, journal or cursor name that is not allowed."""

    code = "invalid_name"


class LimitExceededError(ClientFault):
    """Something larger or more numerous than a limit allows."""

    code = "limit_exceeded"


class QuotaExceededError(ClientFault):
    """The token has made as many topics, cursors or subscriptions as it may."""

    code = "quota_exceeded"


class UnknownTopicError(ClientFault):
    """Reading or changing a topic, or a partition of it, that does not exist."""

    code = "unknown_topic"


class UnknownSubscriptionError(ClientFault):
    """Consuming from, or changing, a subscription or a member that does not exist."""

    code = "unknown_subscription"


class SubscriptionDiffersError(ClientFault):
    """A subscription of this name exists, with another mode or other topics."""

    code = "subscription_differs"


class MemberReplacedError(ClientFault):
    """Another consumer has taken this member's place in a multicast."""

    code = "member_replaced"


class LateAckError(ClientFault):
    """Acknowledged after the lease had ended: the messages are, or were, delivered again."""

    code = "late_ack"


class OffsetGoneError(ClientFault):
    """Reading before the first message: retention removed what was there, or the epoch is older."""

    code = "offset_gone"

    def __init__(self, topic: str, partition: int, offset: int, first_offset: int) -> None:
        super().__init__(
            f"{topic}[{partition}] begins at offset {first_offset}: {first_offset - offset} "
            f"messages from offset {offset} on are gone"
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.first_offset = first_offset

    @property
    def gap(self) -> int:
        """How many messages are gone, from the offset asked for on."""
        return self.first_offset - self.offset

    def __reduce__(self) -> tuple[type[OffsetGoneError], tuple[str, int, int, int]]:
        return (type(self), (self.topic, self.partition, self.offset, self.first_offset))


class OffsetAheadError(ClientFault):
    """Reading beyond the next offset: no message has that offset yet, so the position is a mistake."""

    code = "offset_ahead"

    def __init__(self, topic: str, partition: int, offset: int, next_offset: int) -> None:
        super().__init__(
            f"{topic}[{partition}] has not reached offset {offset}: the next message will be "
            f"{next_offset}"
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.next_offset = next_offset

    def __reduce__(self) -> tuple[type[OffsetAheadError], tuple[str, int, int, int]]:
        return (type(self), (self.topic, self.partition, self.offset, self.next_offset))


class ProducerFault(ClientFault):
    """A named publisher's batch that does not follow its predecessor."""

    code = "producer_gap"


class ProducerFencedError(ProducerFault):
    """A newer term of the same producer has taken over."""

    code = "producer_fenced"


class ProducerForgottenError(ProducerFault):
    """The broker no longer remembers this producer's sequence; it has to begin a new term."""

    code = "producer_forgotten"


class HandshakeError(ClientFault):
    """A connection that did not begin as the protocol asks, or speaks another version of it."""

    code = "handshake"


class UnauthenticatedError(ClientFault):
    """A token is required and none was sent, or the token is unknown or revoked."""

    code = "unauthenticated"


class ForbiddenError(ClientFault):
    """The token lacks the right to do this; the text says which right is needed."""

    code = "forbidden"


class SettingsError(ClientFault):
    """Settings that cannot be used: names the key, the value and where it came from."""

    code = "settings"


# --- The moment's fault: the same request may succeed later. ---


class Unavailable(RunnelError):
    """Cannot be done now; try again. Nothing was changed, unless the text says that this is unknown."""

    code = "unavailable"
    retriable = True


class BusyError(Unavailable):
    """A bounded queue is full. Wait for room, then send again."""

    code = "busy"


class DiskFullError(Unavailable):
    """No room to store more. Reading goes on; publishing works again once there is room."""

    code = "disk_full"


class ReadOnlyError(Unavailable):
    """A sync failed, so this shard takes no more until it has been reopened through recovery."""

    code = "read_only"


class ClosedError(Unavailable):
    """The log, broker or connection has been closed."""

    code = "closed"


class LockedError(Unavailable):
    """Another process has this data directory open."""

    code = "locked"


class ConnectionLostError(Unavailable):
    """The connection broke. The broker may or may not have carried out the requests under way."""

    code = "connection_lost"


class TimeoutExpiredError(Unavailable):
    """The request, or the client's silence, took longer than the caller or the broker allows."""

    code = "timeout"


class SlowReaderError(Unavailable):
    """A subscription that asked to be ended rather than miss messages has fallen too far behind."""

    code = "slow_reader"


class MovedError(Unavailable):
    """Another node serves the topic now; `routes` says which."""

    code = "moved"

    def __init__(self, text: str, routes: Sequence[object] = ()) -> None:
        super().__init__(text)
        self.routes = routes


class FencedError(Unavailable):
    """This node was declared dead, or started again elsewhere: another owns its shards. It has to begin a new life."""


# --- The stored data's fault. ---


class CorruptionError(RunnelError):
    """Stored bytes that fail their checksum or contradict themselves: found, named, never served."""

    code = "corruption"

    def __init__(self, path: str, position: int, problem: str) -> None:
        super().__init__(f"{path}:{position}: {problem}")
        self.path = path
        self.position = position
        self.problem = problem

    def __reduce__(self) -> tuple[type[CorruptionError], tuple[str, int, str]]:
        return (type(self), (self.path, self.position, self.problem))


class FormatVersionError(RunnelError):
    """A data directory written by a newer Runnel than this one."""

    code = "format_version"


# --- Across a connection. ---


def details_of(error: RunnelError) -> dict[str, str | int]:
    """The attributes that a listener sends with code and text, so that the client can rebuild the error."""
    return {name: getattr(error, name) for name in _DETAILS.get(type(error), ())}


def from_details(code: str, text: str, details: Mapping[str, str | int]) -> RunnelError:
    """The error that a listener sent. An unknown code, of a newer broker, becomes a plain RunnelError."""
    kind = _BY_CODE.get(code, RunnelError)
    names = _DETAILS.get(kind)
    if names is None:
        return kind(text)
    try:
        return kind(*(details[name] for name in names))
    except KeyError:
        return RunnelError(f"{code}: {text}")


def _all_kinds(kind: type[RunnelError]) -> Iterator[type[RunnelError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _all_kinds(narrower)


_DETAILS: Mapping[type[RunnelError], Sequence[str]] = {
    MalformedError: ("place", "problem"),
    OffsetGoneError: ("topic", "partition", "offset", "first_offset"),
    OffsetAheadError: ("topic", "partition", "offset", "next_offset"),
    CorruptionError: ("path", "position", "problem"),
}
# A kind without a code of its own is, for callers, the kind that it is derived from.
_BY_CODE = {kind.code: kind for kind in _all_kinds(RunnelError) if "code" in vars(kind)}
