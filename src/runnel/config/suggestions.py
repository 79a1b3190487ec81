"""Suggestions for error messages: the key that an unknown key probably meant, and how to write a table. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from runnel.config.keys import Key
from runnel.config.units import parse_duration, parse_size

# Words of other programs for a key of the same table.
_OTHER_WORDS: Final[Mapping[str, str]] = {
    "port": "listen",
    "host": "listen",
    "bind": "listen",
    "addr": "listen",
    "address": "listen",
    "cert": "tls_certificate",
    "certificate": "tls_certificate",
    "key": "tls_key",
    "auth": "authentication",
    "pattern": "match",
    "name": "match",
    "topic": "match",
    "storage": "keep",
    "store": "keep",
    "persist": "keep",
}
# Words of other programs for a table of a rule.
_OTHER_TABLES: Final[Mapping[str, str]] = {
    "retention": "retain",
    "max_age": "retain",
    "age": "retain",
    "ttl": "retain",
    "retention_bytes": "retain",
    "max_bytes": "retain",
    "segment": "rotate",
    "rotation": "rotate",
}
# The keys of such a table, by the form of their values.
_PARTS: Final[Sequence[tuple[Callable[[str], int], str]]] = (
    (parse_duration, "age"),
    (parse_duration, "every"),
    (parse_size, "bytes"),
)


def sections(known: Collection[str]) -> set[str]:
    """The tables that contain the known keys."""
    return {each.rpartition(".")[0] for each in known} - {""}


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that was probably meant: by another program's word, a wrong section, or a close spelling."""
    table, _, last = name.rpartition(".")
    prefix = f"{table}." if table else ""
    if (other_word := prefix + _OTHER_WORDS.get(last, last)) in known:
        return other_word
    words = {last, _OTHER_WORDS.get(last, last)} if table not in sections(known) else {last}
    elsewhere = {
        each.rpartition(".")[0]: each for each in known if each.rpartition(".")[2] in words
    }
    if elsewhere:
        # In a section that is spelt alike, or else in the first section, which is the most general.
        alike = difflib.get_close_matches(table, elsewhere, n=1, cutoff=0.4)
        return elsewhere[alike[0]] if alike else next(iter(elsewhere.values()))
    # In a known table only the last words are compared: the common table name makes no two keys alike.
    of_table = [each.removeprefix(prefix) for each in known if each.startswith(prefix)]
    if table and of_table:
        near = difflib.get_close_matches(last, of_table, n=1)
        return f"{prefix}{near[0]}" if near else None
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def key_meant(name: str, raw: object, known: Mapping[str, Key], shown: str = "") -> str | None:
    """What to write instead of an unknown key, with the value if it has to look different.

    `shown` is put before the name: `topics[0].`
    """
    table = _OTHER_TABLES.get(name)
    if table is not None and (form := table_form(table, raw, known)) is not None:
        return form
    near = nearest(name, known)
    if near is None:
        return None
    host = known[near].default
    if name.rpartition(".")[2] == "port" and isinstance(host, str) and str(raw).isdecimal():
        return f'{shown}{near} = "{host.rpartition(":")[0]}:{raw}"'
    return f"{shown}{near}"


def variable_meant(variable: str, known: Collection[str]) -> str | None:
    """The environment variable that an unknown one probably meant."""
    table, _, last = variable.rpartition("_")
    other_word = f"{table}_{_OTHER_WORDS.get(last.lower(), last).upper()}"
    if other_word in known:
        return other_word
    return next(iter(difflib.get_close_matches(variable, known, n=1)), None)


def table_form(name: str, raw: object, known: Mapping[str, Key]) -> str | None:
    """How to write a table of a rule that was given a plain value: `retain = { age = "7d" }`."""
    if not isinstance(raw, str):
        return None
    for parse, part in _PARTS:
        if f"{name}.{part}" in known and _parses(parse, raw):
            return f'{name} = {{ {part} = "{raw}" }}'
    return None


def _parses(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True
