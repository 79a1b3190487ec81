"""KSUIDs, the form of a message's uid: 4 bytes of seconds and 16 random bytes; they sort by time.

Their text is the number in base 62, 27 characters long, and sorts the same way.
"""

from __future__ import annotations

from typing import Final

from runnel.errors import MalformedError
from runnel.formats.table import UID_BYTES

_EPOCH_S: Final = 1_400_000_000
_TEXT_LENGTH: Final = 27
_ALPHABET: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_VALUES: Final = {character: value for value, character in enumerate(_ALPHABET)}


def make(time_s: int, random_bytes: bytes) -> bytes:
    """Make a uid for this second from 16 random bytes."""
    if len(random_bytes) != UID_BYTES - 4 or not 0 <= time_s - _EPOCH_S < 2**32:
        raise MalformedError("uid", "needs 16 random bytes and a time from 2014 to 2150")
    return (time_s - _EPOCH_S).to_bytes(4, "big") + random_bytes


def time_s(uid: bytes) -> int:
    """When it was made, in seconds since 1970."""
    _check(uid)
    return int.from_bytes(uid[:4], "big") + _EPOCH_S


def _check(uid: bytes) -> None:
    if len(uid) != UID_BYTES:
        raise MalformedError("uid", f"{len(uid)} bytes; {UID_BYTES} are needed")


def to_text(uid: bytes) -> str:
    """The 27 characters that people see."""
    _check(uid)
    number = int.from_bytes(uid, "big")
    characters = []
    for _ in range(_TEXT_LENGTH):
        number, digit = divmod(number, 62)
        characters.append(_ALPHABET[digit])
    return "".join(reversed(characters))


def from_text(text: str) -> bytes:
    """The uid of a text that `to_text` returned."""
    if len(text) != _TEXT_LENGTH:
        raise MalformedError("uid", f"{len(text)} characters; {_TEXT_LENGTH} are needed")
    number = 0
    for character in text:
        if character not in _VALUES:
            raise MalformedError("uid", f"{character!r} is not a letter or digit")
        number = number * 62 + _VALUES[character]
    if number >= 2 ** (8 * UID_BYTES):
        raise MalformedError("uid", f"{text!r} is above the highest KSUID")
    return number.to_bytes(UID_BYTES, "big")
