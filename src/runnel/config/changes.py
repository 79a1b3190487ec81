"""Compares old and new settings: which changes a running broker can apply, and which need a restart.

Pure: two settings in, a list of changes out. docs/operations.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct

from runnel.config.keys import RULE_KEYS, key_named
from runnel.config.layers import flat_values
from runnel.config.settings import Settings

# The keys outside the rules that a running broker can apply.
RELOADABLE: Final[frozenset[str]] = frozenset(
    (
        "log_level",
        "security.token_connections_max",
        "security.token_topics_max",
        "security.token_cursors_max",
        "security.token_subscriptions_max",
        "security.token_bytes_in_per_s",
        "security.token_messages_in_per_s",
        "security.token_bytes_out_per_s",
        "security.token_messages_out_per_s",
    )
)

_ABSENT: Final = "absent"


class Change(Struct, frozen=True):
    """One key with its values before and after, as they are written in the settings file."""

    key: str
    old: str
    new: str
    is_reloadable: bool


def is_reloadable(name: str) -> bool:
    return name in RELOADABLE or _is_of_rule(name)


def changes_between(old: Settings, new: Settings) -> list[Change]:
    """Every key that differs, in the order of the structs.

    A rule that only one of the two has is represented by `match` and the keys that differ from their defaults.
    """
    before, after = flat_values(old), flat_values(new)
    changes = []
    for name in [*after, *(name for name in before if name not in after)]:
        if name in before and name in after:
            if before[name] == after[name]:
                continue
        elif _is_default_of_rule(name, after.get(name, before.get(name))):
            continue
        write = key_named(name).write
        was = write(before[name]) if name in before else _ABSENT
        now = write(after[name]) if name in after else _ABSENT
        changes.append(Change(name, was, now, is_reloadable(name)))
    return changes


def taken_over(old: Settings, new: Settings) -> Settings:
    """The settings after a reload: new values of reloadable keys, old values of all others."""
    merged = msgspec.structs.replace(old, topics=new.topics)
    for name in RELOADABLE:
        section, _, field = name.rpartition(".")
        field_of = _field_names(getattr(new, section) if section else new)
        if not section:
            merged = msgspec.structs.replace(
                merged, **{field_of(field): getattr(new, field_of(field))}
            )
            continue
        value = getattr(getattr(new, section), field_of(field))
        part = msgspec.structs.replace(getattr(merged, section), **{field_of(field): value})
        merged = msgspec.structs.replace(merged, **{section: part})
    return merged


def _field_names(struct: Struct) -> Callable[[str], str]:
    """A function from a key's last part to its field. They differ: a duration's field ends in its unit."""
    fields = {field.encode_name: field.name for field in msgspec.structs.fields(struct)}
    return fields.__getitem__


def _is_of_rule(name: str) -> bool:
    return name.startswith("topics[")


def _is_default_of_rule(name: str, value: object) -> bool:
    key = RULE_KEYS[name.partition("].")[2]]
    return not key.required and value == key.default
