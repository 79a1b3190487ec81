"""Messages as JSON: as publishers write them, and as readers get them."""

from __future__ import annotations

import binascii
import difflib
import enum
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from runnel.errors import MalformedError
from runnel.formats.message import NO_TAGS, Message
from runnel.formats.table import UID_BYTES
from runnel.formats.wire import GapState
from runnel.protocols.http.encoding.parameters import time_ns, time_text_if_set
from runnel.protocols.http.encoding.problems import FieldFault

_T = TypeVar("_T")

# Readable as text: UTF-8 without control characters other than tab and line ends.
_UNREADABLE: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class MessageIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A message to publish. Its payload is one of `text`, `json` and `base64`; without any it is empty."""

    text: str | None = None
    json: msgspec.Raw | UnsetType = UNSET
    base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    partition_key: str | None = None
    partition_key_base64: str | None = None
    tags: dict[str, str] | None = None
    event_time: int | str | None = None
    transmit_time: int | str | None = None
    uid: str | None = None

    def to_message(self, topic: str, place: str = "$") -> Message:
        """`place` is the message's place in the body, for errors."""
        key = _bytes_of(self.key, self.key_base64, place, "key")
        return Message(
            topic,
            self.payload(place),
            key,
            self.tags or NO_TAGS,
            0 if self.event_time is None else time_ns(f"{place}.event_time", self.event_time),
            0
            if self.transmit_time is None
            else time_ns(f"{place}.transmit_time", self.transmit_time),
            uid=None if self.uid is None else uid_of(f"{place}.uid", self.uid),
            partition_key=_bytes_of(
                self.partition_key, self.partition_key_base64, place, "partition_key"
            ),
        )

    def payload(self, place: str = "$") -> bytes:
        text, base64 = self.text, self.base64
        if self.json is UNSET:
            if base64 is None:
                return b"" if text is None else text.encode()
            if text is None:
                return bytes_of_base64(f"{place}.base64", base64)
        elif text is None and base64 is None:
            return _checked_utf8(f"{place}.json", bytes(self.json))
        given = [name for name in ("text", "json", "base64") if self._has(name)]
        raise FieldFault(place, f"{' and '.join(given)} are given; a message has one payload")

    def _has(self, name: str) -> bool:
        return getattr(self, name) not in (None, UNSET)


def _bytes_of(text: str | None, base64: str | None, place: str, name: str) -> bytes | None:
    if base64 is None:
        return None if text is None else text.encode()
    if text is not None:
        raise FieldFault(place, f"{name} and {name}_base64 are given; one of them is enough")
    return bytes_of_base64(f"{place}.{name}_base64", base64)


def _checked_utf8(field: str, data: bytes) -> bytes:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise FieldFault(field, f"a string in it is not UTF-8: {error.reason}") from None
    return data


def bytes_of_base64(field: str, text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FieldFault(field, f"not base64 (RFC 4648, with padding): {error}") from None


def uid_of(field: str, text: str) -> bytes:
    uid = bytes_of_base64(field, text)
    if len(uid) != UID_BYTES:
        raise FieldFault(field, f"{len(uid)} bytes; a uid has {UID_BYTES}")
    return uid


# --- Decoding bodies ---


def decoded(
    decoder: msgspec.json.Decoder[_T],
    body: bytes | bytearray,
    *,
    fields: Sequence[str] = (),
    choices: Mapping[str, str] = MappingProxyType({}),
) -> _T:
    """Decode a body. An error names the place in it that is wrong.

    `fields`: the known names, of which an error suggests one. `choices`: by field, the words that it may be.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _validation_fault(error, fields, choices) from None
    except msgspec.DecodeError as error:
        raise MalformedError("body", f"not JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise MalformedError("body", f"a string in it is not UTF-8: {error.reason}") from None
    except RecursionError:
        raise MalformedError("body", "JSON that is nested too deeply") from None


_PLACED: Final = re.compile(r"(?P<problem>.*?)(?: - at `(?P<place>.*)`)?", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)


def _validation_fault(
    error: msgspec.ValidationError, fields: Sequence[str], choices: Mapping[str, str]
) -> FieldFault:
    """msgspec's error, with its place as `field`."""
    found = _PLACED.fullmatch(str(error))
    assert found is not None
    place, problem = found["place"] or "$", found["problem"]
    if unknown := _UNKNOWN.fullmatch(problem):
        name = unknown["name"][:64]
        near = difflib.get_close_matches(name, fields, 1)
        allowed = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
        return FieldFault(f"{place}.{name}", f"is not known here; {allowed}")
    words = choices.get(place.rpartition(".")[2])
    return FieldFault(place, f"{problem}; it is one of {words}" if words else problem)


MESSAGE_FIELDS: Final = tuple(MessageIn.__struct_fields__)


# --- To readers ---


class PayloadForm(enum.StrEnum):
    """How payloads are given to a reader."""

    AUTO = "auto"  # text if it is readable, otherwise base64
    TEXT = "text"  # always text, with U+FFFD for bytes that are not UTF-8
    JSON = "json"  # JSON if it is JSON, otherwise as auto
    BASE64 = "base64"

    @classmethod
    def checked(cls, text: str) -> PayloadForm:
        try:
            return cls(text)
        except ValueError:
            raise FieldFault("payload", f"{text[:64]!r}; {', '.join(cls)} are known") from None


class TimeForm(enum.StrEnum):
    """How the times of messages are given to a reader. Text costs as much as the rest of a message."""

    NS = "ns"  # nanoseconds since 1970, as numbers
    RFC_3339 = "rfc3339"  # as text beside the numbers, which JavaScript rounds


TIMES_TEXT: Final = "How times are given: `rfc3339` has texts with nanoseconds beside the numbers."


class MessageOut(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A message as a reader gets it: the payload is `text`, `json` or `base64`, keys likewise."""

    topic: str
    partition: int
    offset: int
    event_time_ns: int
    transmit_time_ns: int
    receive_time_ns: int
    size: Annotated[int, Meta(description="Bytes of the payload.")]
    tags: dict[str, str]
    epoch: int | UnsetType = UNSET
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    partition_key: str | UnsetType = UNSET
    partition_key_base64: str | UnsetType = UNSET
    uid: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    json: Any = UNSET
    base64: str | UnsetType = UNSET
    ack: str | UnsetType = UNSET
    attempt: int | UnsetType = UNSET
    event_time: str | UnsetType = UNSET
    transmit_time: str | UnsetType = UNSET
    receive_time: str | UnsetType = UNSET


_Out = TypeVar("_Out", bound=MessageOut)


def message_out(
    message: Message, form: PayloadForm = PayloadForm.AUTO, times: TimeForm = TimeForm.NS
) -> MessageOut:
    return message_as(MessageOut, message, form, times)


def message_as(
    kind: type[_Out],
    message: Message,
    form: PayloadForm,
    times: TimeForm,
    *,
    epoch: int | UnsetType = UNSET,
    ack: str | UnsetType = UNSET,
    attempt: int | UnsetType = UNSET,
) -> _Out:
    text, json, base64 = _payload_out(message.payload, form)
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    partition_key: str | UnsetType = UNSET
    partition_key_base64: str | UnsetType = UNSET
    if message.key is not None:
        key, key_base64 = _text_or_base64(message.key)
    if message.partition_key is not None and message.partition_key != message.key:
        partition_key, partition_key_base64 = _text_or_base64(message.partition_key)
    event_time: str | UnsetType = UNSET
    transmit_time: str | UnsetType = UNSET
    receive_time: str | UnsetType = UNSET
    if times is TimeForm.RFC_3339:
        event_time = time_text_if_set(message.event_time_ns)
        transmit_time = time_text_if_set(message.transmit_time_ns)
        receive_time = time_text_if_set(message.receive_time_ns)
    return kind(
        message.topic,
        message.partition,
        message.offset,
        message.event_time_ns,
        message.transmit_time_ns,
        message.receive_time_ns,
        len(message.payload),
        dict(message.tags),
        epoch,
        key,
        key_base64,
        partition_key,
        partition_key_base64,
        UNSET if message.uid is None else b64encode(message.uid).decode(),
        text,
        json,
        base64,
        ack,
        attempt,
        event_time,
        transmit_time,
        receive_time,
    )


def messages_out(
    messages: Iterable[Message], form: PayloadForm, times: TimeForm
) -> list[MessageOut]:
    return [message_out(message, form, times) for message in messages]


def _payload_out(payload: bytes, form: PayloadForm) -> tuple[str | UnsetType, Any, str | UnsetType]:
    if form is PayloadForm.TEXT:
        return payload.decode("utf-8", "replace"), UNSET, UNSET
    if form is PayloadForm.BASE64:
        return UNSET, UNSET, b64encode(payload).decode()
    if form is PayloadForm.JSON and (json := one_line_json(payload)) is not None:
        return UNSET, json, UNSET
    text, base64 = _text_or_base64(payload)
    return text, UNSET, base64


def _text_or_base64(data: bytes) -> tuple[str | UnsetType, str | UnsetType]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        pass
    else:
        if _UNREADABLE.search(text) is None:
            return text, UNSET
    return UNSET, b64encode(data).decode()


def one_line_json(payload: bytes) -> msgspec.Raw | None:
    """The payload if it is JSON, without line ends, so that it can stand within other JSON; None if it is not."""
    try:
        payload.decode()
        msgspec.json.decode(payload, type=msgspec.Raw)
        return msgspec.Raw(msgspec.json.format(payload, indent=-1))
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return None


class Gap(msgspec.Struct, frozen=True):
    """Messages that a reader does not get, and why: overflow, retention, damage or restart."""

    reason: str
    missed: Annotated[int, Meta(description="0: the number is not known.")]
    topic: str
    partition: int
    first_offset: int
    next_offset: int
    text: str


def gap_out(gap: GapState) -> Gap:
    return Gap(
        gap.reason,
        gap.missed,
        gap.topic,
        gap.partition,
        gap.first_offset,
        gap.next_offset,
        gap.text,
    )
