"""The definition of a subscription: name, topics, mode and options, and its encoding in the catalogue."""

from __future__ import annotations

import enum
import math
from typing import Final

import msgspec

from runnel.errors import ClientFault, MalformedError
from runnel.formats.heads import Start
from runnel.formats.work_heads import WorkOptions
from runnel.topics.names import DEAD_LETTER_PREFIX, NAME_BYTES_MAX, Label, check_label, check_text

_MS: Final = 1_000_000
_SECOND: Final = 1_000_000_000
_EARLIEST: Final = Start("earliest")

LEASE_NS_MIN: Final = 100 * _MS
"""Below this a consumer could not renew its leases in time."""

DURATION_NS_MAX: Final = 10 * 365 * 86_400 * _SECOND
"""The longest duration of any option: ten years, which in nanoseconds fit into 64 bits many times over."""


UNNAMED_MARK: Final = "~"
"""The names that the broker gives to unnamed members of a multicast begin with it."""


class Mode(enum.StrEnum):
    """Which consumers get a message."""

    SHARED = "shared"  # any consumer with room
    KEY_SHARED = "key_shared"  # one consumer at a time for each key, in order
    MULTICAST = "multicast"  # every member

    @classmethod
    def checked(cls, text: str) -> Mode:
        try:
            return cls(text)
        except ValueError:
            raise ClientFault(
                f"mode {text!r} is none of {', '.join(mode.value for mode in cls)}"
            ) from None


class SubscriptionOptions(msgspec.Struct, frozen=True, gc=False):
    """The options of a subscription: leases, retries, dead letters, absent members."""

    lease_ns: int = 30 * _SECOND
    processing_ns_max: int = 3_600 * _SECOND
    deliveries_max: int = 8  # 0: no limit, and no dead letters
    retry_delay_ns: int = 1 * _SECOND
    retry_delay_ns_max: int = 300 * _SECOND
    backoff: float = 2.0  # the factor from each delay to the next
    absent_ns_max: int = 3_600 * _SECOND

    def __post_init__(self) -> None:
        for name in (
            "lease_ns",
            "processing_ns_max",
            "retry_delay_ns",
            "retry_delay_ns_max",
            "absent_ns_max",
        ):
            value = getattr(self, name)
            if not 0 <= value <= DURATION_NS_MAX:
                raise ClientFault(
                    f"{_option_name(name)} of {_ms(value)} is not within 0 and 10 years"
                )
        if self.lease_ns < LEASE_NS_MIN:
            raise ClientFault(
                f"lease of {_ms(self.lease_ns)} is too short to be renewed in time: "
                f"{_ms(LEASE_NS_MIN)} or more"
            )
        if self.processing_ns_max < self.lease_ns:
            raise ClientFault(
                f"processing_max of {_ms(self.processing_ns_max)} is shorter than the lease of "
                f"{_ms(self.lease_ns)}: it must be at least as long"
            )
        if self.retry_delay_ns_max < self.retry_delay_ns:
            raise ClientFault(
                f"retry_delay_max of {_ms(self.retry_delay_ns_max)} is shorter than the retry_delay of "
                f"{_ms(self.retry_delay_ns)}: it must be at least as long"
            )
        if not 0 <= self.deliveries_max < 2**31:
            raise ClientFault(
                f"deliveries_max of {self.deliveries_max} is no count: 1 or more, or 0 for no limit"
            )
        if not math.isfinite(self.backoff) or self.backoff < 1:
            raise ClientFault(f"backoff of {self.backoff}: it must be a number of 1 or more")

    def delay_ns(self, failures: int) -> int:
        """How long a message waits for its next delivery after this many failures."""
        try:
            delay = self.retry_delay_ns * self.backoff ** (max(failures, 1) - 1)
        except OverflowError:
            return self.retry_delay_ns_max if self.retry_delay_ns else 0
        return int(min(delay, self.retry_delay_ns_max))

    @classmethod
    def of(cls, wire: WorkOptions | None) -> SubscriptionOptions:
        """The options that a client gave, with defaults for the others.

        A default ceiling rises to a lease or delay that is longer.
        """
        defaults = cls()
        if wire is None:
            return defaults
        lease_ns = _given(wire.lease_ms, defaults.lease_ns)
        retry_delay_ns = _given(wire.retry_delay_ms, defaults.retry_delay_ns)
        return cls(
            lease_ns=lease_ns,
            processing_ns_max=_given(
                wire.processing_ms_max, max(defaults.processing_ns_max, lease_ns)
            ),
            deliveries_max=(
                defaults.deliveries_max if wire.deliveries_max is None else wire.deliveries_max
            ),
            retry_delay_ns=retry_delay_ns,
            retry_delay_ns_max=_given(
                wire.retry_delay_ms_max, max(defaults.retry_delay_ns_max, retry_delay_ns)
            ),
            backoff=defaults.backoff if wire.backoff is None else wire.backoff,
            absent_ns_max=_given(wire.absent_ms_max, defaults.absent_ns_max),
        )

    def changed(self, given: WorkOptions | None) -> SubscriptionOptions:
        """These options, with the given ones replaced."""
        if given is None:
            return self
        fields = msgspec.structs.asdict(given).items()
        changes = {name: value for name, value in fields if value is not None}
        return SubscriptionOptions.of(msgspec.structs.replace(self.to_wire(), **changes))

    def to_wire(self) -> WorkOptions:
        return WorkOptions(
            lease_ms=self.lease_ns // _MS,
            processing_ms_max=self.processing_ns_max // _MS,
            deliveries_max=self.deliveries_max,
            retry_delay_ms=self.retry_delay_ns // _MS,
            retry_delay_ms_max=self.retry_delay_ns_max // _MS,
            backoff=self.backoff,
            absent_ms_max=self.absent_ns_max // _MS,
        )


class MemberRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A named member of a multicast."""

    name: str
    since_ns: int  # when it joined
    absent_since_ns: int = 0  # when its last consumer left; 0: it has a consumer


class Definition(msgspec.Struct, frozen=True, array_like=True):
    """A subscription as the catalogue stores it. No two subscriptions ever have the same id."""

    id: int
    name: str
    patterns: tuple[str, ...]
    mode: Mode
    options: SubscriptionOptions
    is_paused: bool = False
    made_ns: int = 0
    members: tuple[MemberRecord, ...] = ()
    owner: str = (
        ""  # the token that made it; empty: made without a token, or before there were quotas
    )
    starts: dict[str, Start] = {}
    """Where the subscription ("") or a member begins. Only several nodes record it: see `later_start`."""

    def later_start(self, member: str) -> Start:
        """Where a partition begins that nobody served, or another node, when the subscription or the member began.

        "The latest message" means the one at that time.
        """
        start = self.starts.get(member, _EARLIEST)
        if start.kind != "latest":
            return start
        since = [each.since_ns for each in self.members if each.name == member]
        return Start("time", time_ns=since[0] if since else self.made_ns)

    def with_member(self, member: MemberRecord) -> Definition:
        """With this member, unless there is one of its name."""
        if any(each.name == member.name for each in self.members):
            return self
        return msgspec.structs.replace(self, members=(*self.members, member))

    def without_member(self, name: str) -> Definition:
        left = tuple(each for each in self.members if each.name != name)
        starts = {each: start for each, start in self.starts.items() if each != name}
        return msgspec.structs.replace(self, members=left, starts=starts)


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Definition)
_FIELDS_OF_ONE_NODE: Final = Definition.__struct_fields__[:-1]


def encode(definition: Definition) -> bytes:
    if definition.starts:
        return _encoder.encode(definition)
    # As it was before there were several nodes: what a single one records did not change.
    fields = [getattr(definition, name) for name in _FIELDS_OF_ONE_NODE]
    return _encoder.encode(fields)


def decode(content: bytes) -> Definition:
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, ClientFault) as error:
        raise MalformedError("subscription definition", str(error)) from error


def _given(value_ms: int | None, default_ns: int) -> int:
    return default_ns if value_ms is None else value_ms * _MS


def _option_name(field: str) -> str:
    return field.replace("_ns", "")


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / _MS:g} ms"


def check_member(name: str) -> None:
    check_text("member name", name)
    if name.startswith(UNNAMED_MARK):
        raise ClientFault(
            f"member name {name!r}: those that begin with {UNNAMED_MARK} are given to unnamed members"
        )


def check_name(name: str) -> None:
    check_label(Label.SUBSCRIPTION, name)
    room = NAME_BYTES_MAX - len(DEAD_LETTER_PREFIX)
    if len(name.encode()) > room:
        raise ClientFault(
            f"subscription name of {len(name.encode())} bytes: at most {room} are allowed, so that its "
            f"dead letters can have a topic"
        )
    if name.startswith("!"):
        raise ClientFault(f"subscription name {name!r}: names that begin with ! are the system's")
