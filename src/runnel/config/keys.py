"""The known keys, derived from the settings' structs. Each key parses and writes its values."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import NODEFAULT, Struct, inspect

from runnel.config import units
from runnel.config.settings import AUTO, DESCRIPTIONS, Kind, Settings

# TOML has no null, so this word stands for the absence of an optional value.
ABSENT: Final = "none"

# The word for `settings.AUTO`.
_AUTO_WORD: Final = "auto"

TEXT_CHARS_MAX: Final = 4096
TEXTS_MAX: Final = 1000

# More digits than any bound has, and few enough that parsing them costs nothing.
_WHOLE_NUMBER: Final = re.compile(r"-?[0-9]{1,30}")

_PARSERS: Final = {
    Kind.SIZE: units.parse_size,
    Kind.DURATION: units.parse_duration,
    Kind.TIME_OF_DAY: units.parse_time_of_day,
}
_FORMATTERS: Final = {
    Kind.SIZE: units.format_size,
    Kind.DURATION: units.format_duration,
    Kind.TIME_OF_DAY: units.format_time_of_day,
}
_NOT_OF_KIND: Final = {
    Kind.SIZE: f"not a size; {units.SIZE_HINT}",
    Kind.DURATION: f"not a duration; {units.DURATION_HINT}",
    Kind.TIME_OF_DAY: f"not a time of day; {units.TIME_OF_DAY_HINT}",
    Kind.COUNT: "not a whole number; write one without quotes, such as 64",
    Kind.COUNT_OR_AUTO: 'neither a whole number nor "auto"; write one such as 4',
    Kind.TEXT: "not text; write it in quotes",
    Kind.TEXTS: 'not a list of texts; write ["a", "b"]',
    Kind.FLAG: "neither true nor false; write one of them without quotes",
}


class Key(Struct, frozen=True, kw_only=True):
    """One setting: its dotted name, and the values that it may have."""

    name: str
    kind: Kind
    optional: bool
    minimum: int | None
    maximum: int | None
    choices: tuple[str, ...]
    default: object

    @property
    def required(self) -> bool:
        """Whether it must be given, as the `match` of a rule must."""
        return self.default is NODEFAULT

    @property
    def description(self) -> str:
        """One line of documentation."""
        return DESCRIPTIONS[self.name]

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "RUNNEL_" + self.name.upper().replace(".", "_")

    def parse(self, raw: object) -> object:
        """Convert a value from a TOML file. ValueError says what would be right."""
        if self.optional and raw == ABSENT:
            return None
        if self.kind is Kind.CHOICE:
            return self._parse_choice(raw)
        # In Python, true is a number; in a settings file it is not.
        is_number = isinstance(raw, int) and not isinstance(raw, bool)
        match self.kind, raw:
            case (Kind.TEXT, str()):
                return _checked_text(raw)
            case (Kind.TEXTS, list()):
                return _checked_texts(raw)
            case (Kind.FLAG, bool()):
                return raw
            case (Kind.COUNT | Kind.COUNT_OR_AUTO | Kind.SIZE, int()) if is_number:
                return self._within_bounds(raw)
            case (Kind.COUNT_OR_AUTO, str()) if raw == _AUTO_WORD:
                return AUTO
            case (Kind.SIZE | Kind.DURATION | Kind.TIME_OF_DAY, str()):
                return self._within_bounds(_PARSERS[self.kind](raw))
        raise ValueError(_NOT_OF_KIND[self.kind])

    def parse_text(self, text: str) -> object:
        """Convert the text of an environment variable or a flag, which have no types."""
        if self.optional and text == ABSENT:
            return None
        match self.kind:
            case Kind.COUNT:
                if not _WHOLE_NUMBER.fullmatch(text.strip()):
                    raise ValueError("not a whole number; write one such as 64")
                return self._within_bounds(int(text))
            case Kind.COUNT_OR_AUTO if _WHOLE_NUMBER.fullmatch(text.strip()):
                return self._within_bounds(int(text))
            case Kind.FLAG:
                if text not in ("true", "false"):
                    raise ValueError("neither true nor false; write one of them")
                return text == "true"
            case Kind.TEXTS:
                given = [] if text in ("", ABSENT) else text.split(",")
                return _checked_texts([each.strip() for each in given])
            case _:
                return self.parse(text)

    def write(self, value: object) -> str:
        """The TOML text that `parse` converts back to `value`."""
        if value is None:
            return json.dumps(ABSENT)
        if isinstance(value, bool):
            return "true" if value else "false"
        if self.kind is Kind.COUNT_OR_AUTO and value == AUTO:
            return json.dumps(_AUTO_WORD)
        if self.kind in (Kind.COUNT, Kind.COUNT_OR_AUTO):
            return str(value)
        if isinstance(value, tuple | list):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, int):
            return json.dumps(_FORMATTERS[self.kind](value))
        # `parse` refuses control characters, so JSON's escapes are the same as TOML's.
        return json.dumps(str(value), ensure_ascii=False)

    def _within_bounds(self, value: int) -> int:
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"too small; the least is {self._write_bound(self.minimum)}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"too large; the most is {self._write_bound(self.maximum)}")
        return value

    def _write_bound(self, bound: int) -> str:
        formatter = _FORMATTERS.get(self.kind)
        return str(bound) if formatter is None else formatter(bound)

    def _parse_choice(self, raw: object) -> object:
        if isinstance(raw, str) and raw in self.choices:
            return raw
        allowed = (*self.choices, ABSENT) if self.optional else self.choices
        hint = f"use one of {', '.join(allowed)}"
        near = difflib.get_close_matches(raw, allowed, n=1) if isinstance(raw, str) else []
        raise ValueError(f"{hint}; did you mean {near[0]}?" if near else hint)


def _checked_text(text: str) -> str:
    if not text:
        raise ValueError("empty; leave the key out for its default")
    if len(text) > TEXT_CHARS_MAX:
        raise ValueError(f"too long; the most is {TEXT_CHARS_MAX} characters")
    if any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in text):
        raise ValueError("control characters are not allowed here")
    # Bytes of a flag or variable that are not UTF-8 arrive as lone surrogates.
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        raise ValueError("not valid UTF-8")
    return text


def _checked_texts(texts: Sequence[object]) -> tuple[str, ...]:
    if len(texts) > TEXTS_MAX:
        raise ValueError(f"too many; the most is {TEXTS_MAX}")
    checked = []
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(_NOT_OF_KIND[Kind.TEXTS])  # noqa: TRY004 - a setting's fault, not a type's
        checked.append(_checked_text(text))
    return tuple(checked)


def _keys_of(struct: inspect.StructType, prefix: str) -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for field in struct.fields:
        name = f"{prefix}{field.encode_name}"
        match field.type:
            case inspect.StructType():
                keys |= _keys_of(field.type, f"{name}.")
            case inspect.VarTupleType(item_type=inspect.StructType() as item):
                keys |= _keys_of(item, f"{name}.")
            case _:
                keys[name] = _key_of(name, field)
    return keys


def _key_of(name: str, field: inspect.Field) -> Key:
    kind: Kind | None = None
    type_ = field.type
    optional = False
    if isinstance(type_, inspect.UnionType):
        optional = True
        (type_,) = (each for each in type_.types if not isinstance(each, inspect.NoneType))
    if isinstance(type_, inspect.Metadata):
        kind = (type_.extra or {}).get("kind")
        type_ = type_.type
    minimum = maximum = None
    choices: tuple[str, ...] = ()
    match type_:
        case inspect.IntType():
            kind = kind or Kind.COUNT
            # AUTO is written as a word, never as its number.
            minimum = AUTO + 1 if kind is Kind.COUNT_OR_AUTO else type_.ge
            maximum = type_.le if type_.lt is None else type_.lt - 1
        case inspect.EnumType():
            kind = Kind.CHOICE
            choices = tuple(member.value for member in type_.cls)
        case inspect.BoolType():
            kind = Kind.FLAG
        case inspect.StrType():
            kind = Kind.TEXT
        case inspect.VarTupleType(item_type=inspect.StrType()):
            kind = Kind.TEXTS
        case _:
            raise TypeError(f"{name} has a type that settings cannot have: {field.type}")
    return Key(
        name=name,
        kind=kind,
        optional=optional,
        minimum=minimum,
        maximum=maximum,
        choices=choices,
        default=field.default,
    )


def _all_keys() -> dict[str, Key]:
    struct = inspect.type_info(Settings)
    assert isinstance(struct, inspect.StructType)
    return _keys_of(struct, "")


# Every key in the order of the structs. The keys of a rule are named `topics.match` and so on.
ALL_KEYS: Final[Mapping[str, Key]] = _all_keys()
RULE_PREFIX: Final = "topics."
RULE_KEYS: Final[Mapping[str, Key]] = {
    name.removeprefix(RULE_PREFIX): key
    for name, key in ALL_KEYS.items()
    if name.startswith(RULE_PREFIX)
}
PLAIN_KEYS: Final[Mapping[str, Key]] = {
    name: key for name, key in ALL_KEYS.items() if not name.startswith(RULE_PREFIX)
}

_RULE_INDEX: Final = re.compile(r"\[[0-9]+\]")


def key_named(name: str) -> Key:
    """The key of an effective value, whose name contains the rule's index: `topics[0].match`."""
    return ALL_KEYS[_RULE_INDEX.sub("", name)]
