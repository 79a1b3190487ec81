"""Reads the file, the environment and the flags, each into a layer of values with sources.

Pure: texts and mappings in, values and problems out. Problems are collected, so that all can be reported at once.
"""

from __future__ import annotations

import enum
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from runnel.config.keys import PLAIN_KEYS, RULE_KEYS, Key
from runnel.config.settings import Settings
from runnel.config.suggestions import key_meant, nearest, sections, table_form, variable_meant
from runnel.config.toml_lines import key_lines

VARIABLE_PREFIX: Final = "RUNNEL_"
CONFIG_VARIABLE: Final = "RUNNEL_CONFIG"
URL_VARIABLE: Final = "RUNNEL_URL"
TOKEN_VARIABLE: Final = "RUNNEL_TOKEN"
TOPICS_VARIABLE: Final = "RUNNEL_TOPICS"

# Shorter names of keys, outside any table: the only names that cluster and node had before there was a table for them.
SHORT_NAMES: Final[Mapping[str, str]] = {
    "cluster": "cluster.name",
    "node": "cluster.node",
    "processes": "cluster.processes",
}

# Variables with the prefix that are not settings.
OTHER_VARIABLES: Final[Mapping[str, str]] = {
    CONFIG_VARIABLE: "Path of the settings file, instead of ./runnel.toml.",
    URL_VARIABLE: "URL of the broker for commands and clients, instead of runnel://127.0.0.1:7470.",
    TOKEN_VARIABLE: "Token of commands and clients for a broker that requires one.",
}

# Variables that Kubernetes sets in every container if there is a service called "runnel".
_SERVICE_VARIABLE: Final = re.compile(
    r"RUNNEL_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)

_SHOWN_CHARS_MAX: Final = 80


class Origin(enum.StrEnum):
    """The four kinds of source. A later one takes precedence over an earlier one."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


class SettingSource(Struct, frozen=True):
    """The source of a value; `place` is a file and line, a variable or a flag."""

    origin: Origin
    place: str = ""

    def __str__(self) -> str:
        # A path may contain any character, and this text goes into one-line comments and messages.
        place = "".join(char if char.isprintable() else "?" for char in self.place)
        return place or self.origin.value


DEFAULT_SOURCE: Final = SettingSource(Origin.DEFAULT)


class Given(Struct, frozen=True):
    """A value and its source."""

    value: object
    source: SettingSource


class Layer(Struct, frozen=True, kw_only=True):
    """The values of one source. The keys of rules have an index: `topics[0].match`."""

    values: Mapping[str, Given] = {}
    rule_count: int | None = None  # None: the source has no rules
    problems: tuple[str, ...] = ()
    faulty: frozenset[str] = frozenset()  # keys with a problem, left out of further checks


class _LayerBuilder:
    """Collects the values and problems of one source."""

    def __init__(self, locate: Callable[[str], SettingSource]) -> None:
        self._locate_written = locate
        self._short: dict[str, str] = {}  # keys that were given by their short names
        self._values: dict[str, Given] = {}
        self._rule_count: int | None = None
        self._problems: list[str] = []
        self._faulty: set[str] = set()

    def build(self) -> Layer:
        return Layer(
            values=self._values,
            rule_count=self._rule_count,
            problems=tuple(self._problems),
            faulty=frozenset(self._faulty),
        )

    def problem(self, text: str) -> None:
        self._problems.append(text)

    def add_table(
        self, table: Mapping[str, object], known: Mapping[str, Key], shown: str, within: str = ""
    ) -> None:
        """Add the values of `table`, at `within` among the `known` keys. Messages put `shown` before a name."""
        for part, raw in table.items():
            name = f"{within}{part}"
            key = known.get(name)
            if key is not None:
                self.add_value(f"{shown}{name}", key, raw)
            elif shown == "" and name in SHORT_NAMES and not isinstance(raw, Mapping):
                full = self.given_short(name)
                self.add_value(full, known[full], raw)
            elif shown == "" and name == "topics":
                self.add_rules(raw)
            elif any(each.startswith(f"{name}.") for each in known):
                if isinstance(raw, Mapping):
                    self.add_table(raw, known, shown, f"{name}.")
                else:
                    form = table_form(name, raw, known)
                    right = "" if form is None else f"; write {form}"
                    self._refuse(f"{shown}{name}", raw, f"a table of keys, not a value{right}")
            else:
                self.unknown(name, raw, known, shown)

    def add_rules(self, raw: object) -> None:
        if not isinstance(raw, list):
            self._refuse("topics", raw, "not a list of rules; write [[topics]] above each of them")
            return
        self._rule_count = len(raw)
        for index, rule in enumerate(raw):
            name = f"topics[{index}]"
            if not isinstance(rule, Mapping):
                self._refuse(name, rule, 'not a rule; write { match = "…" }')
                self._faulty.add(f"{name}.match")
                continue
            self.add_table(rule, RULE_KEYS, f"{name}.")
            if "match" not in rule:
                self.problem(f"{name} ({self._locate(name)}): match is missing")
                self._faulty.add(f"{name}.match")

    def given_short(self, short: str) -> str:
        """The key that this short name stands for. It must not be given by both names."""
        name = SHORT_NAMES[short]
        self._short[name] = short
        return name

    def add_value(self, name: str, key: Key, raw: object) -> None:
        self._add(name, raw, key.parse)

    def add_text(self, name: str, key: Key, text: str) -> None:
        self._add(name, text, lambda _: key.parse_text(text))

    def add_rules_text(self, text: str) -> None:
        """Add the rules of a variable or a flag: a TOML array on one line."""
        try:
            parsed = tomllib.loads(f"topics = {text}")
        except (ValueError, RecursionError):
            parsed = {}
        # More than one key: the text continues after the array, on another line.
        if len(parsed) != 1 or not isinstance(parsed["topics"], list):
            hint = 'not a TOML array; write [{ match = "sensors/*", keep = "memory" }, …]'
            self._refuse("topics", text, hint)
        else:
            self.add_rules(parsed["topics"])

    def unknown(self, name: str, raw: object, known: Mapping[str, Key], shown: str = "") -> None:
        tables = sections(known)
        if shown == "":
            tables.add("topics")
        full = f"{shown}{name}"
        if not isinstance(raw, Mapping):
            near = key_meant(name, raw, known, shown)
        elif (table := nearest(name, tables)) is not None:
            near = f"{shown}{table}"
        else:
            near = None
        what = f"table {full}" if isinstance(raw, Mapping) else f"key {full} = {shown_value(raw)}"
        self.problem(f"unknown {what} ({self._locate(full)})" + did_you_mean(near))

    def _locate(self, name: str) -> SettingSource:
        return self._locate_written(self._short.get(name, name))

    def _add(self, name: str, raw: object, parse: Callable[[object], object]) -> None:
        if name in self._short and (name in self._values or name in self._faulty):
            short = self._short.pop(name)
            both = (
                f"{name} ({self._locate_written(name)}) and {short} ({self._locate_written(short)})"
            )
            self.problem(f"{both} are the same setting; give one of them")
            self._faulty.add(name)
            return
        try:
            value = parse(raw)
        except ValueError as error:
            self._refuse(name, raw, str(error))
        else:
            self._values[name] = Given(value, self._locate(name))

    def _refuse(self, name: str, raw: object, problem: str) -> None:
        self._faulty.add(name)
        self.problem(f"{name} = {shown_value(raw)} ({self._locate(name)}): {problem}")


def did_you_mean(near: str | None) -> str:
    """The last part of a message about an unknown name."""
    return f"; did you mean {near}?" if near else "; `runnel config show` lists all keys"


def shown_value(raw: object) -> str:
    """A value roughly as the user wrote it, in one short line."""
    if isinstance(raw, bool):
        text = "true" if raw else "false"
    elif isinstance(raw, str):
        text = json.dumps(raw, ensure_ascii=not raw.isprintable())
    elif isinstance(raw, (list, Mapping)):
        text = "[…]" if isinstance(raw, list) else "{…}"
    else:
        text = str(raw)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[: _SHOWN_CHARS_MAX - 1]}…"


def flat_values(settings: Settings) -> dict[str, object]:
    """Every value by its dotted name, in the order of the structs. Rules have an index: `topics[0].match`."""
    values: dict[str, object] = {}

    def flatten(table: Mapping[str, object], prefix: str) -> None:
        for part, value in table.items():
            if isinstance(value, Mapping):
                flatten(value, f"{prefix}{part}.")
            else:
                values[f"{prefix}{part}"] = value

    builtins = msgspec.to_builtins(settings)
    rules = builtins.pop("topics")
    flatten(builtins, "")
    for index, rule in enumerate(rules):
        flatten(rule, f"topics[{index}].")
    return values


def default_layer(settings: Settings) -> Layer:
    """The layer of the defaults."""
    values = {name: Given(value, DEFAULT_SOURCE) for name, value in flat_values(settings).items()}
    return Layer(values=values, rule_count=len(settings.topics))


def file_layer(text: str, path: str) -> Layer:
    """The layer of a TOML file. `path` is for messages."""
    lines = key_lines(text)

    def locate(name: str) -> SettingSource:
        # A value in an inline table or array has the line of the key that holds the table.
        while name not in lines and name:
            name = name[: max(name.rfind("."), name.rfind("["), 0)]
        return SettingSource(Origin.FILE, f"{path}:{lines[name]}" if name else path)

    builder = _LayerBuilder(locate)
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        builder.problem(f"{path}: not valid TOML: {error}")
    except RecursionError:
        builder.problem(f"{path}: not valid TOML: nested too deeply")
    else:
        builder.add_table(table, PLAIN_KEYS, "")
    return builder.build()


def environment_layer(environment: Mapping[str, str]) -> Layer:
    """The layer of the `RUNNEL_*` variables. All others are ignored."""
    keys = {key.variable: key for key in PLAIN_KEYS.values()}
    short = {VARIABLE_PREFIX + name.upper(): name for name in SHORT_NAMES}
    known = {*keys, *short, TOPICS_VARIABLE, *OTHER_VARIABLES}
    variables = {key.name: variable for variable, key in keys.items()}
    variables |= {name: variable for variable, name in short.items()}

    def locate(name: str) -> SettingSource:
        return SettingSource(Origin.ENVIRONMENT, variables.get(name, TOPICS_VARIABLE))

    builder = _LayerBuilder(locate)
    for variable, text in sorted(environment.items()):
        if not variable.startswith(VARIABLE_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if _SERVICE_VARIABLE.fullmatch(variable):
            continue
        if variable == TOPICS_VARIABLE:
            builder.add_rules_text(text)
        elif variable in short:
            name = builder.given_short(short[variable])
            builder.add_text(name, PLAIN_KEYS[name], text)
        elif variable in keys:
            builder.add_text(keys[variable].name, keys[variable], text)
        elif variable.startswith(f"{TOPICS_VARIABLE}_"):
            builder.problem(
                f"unknown variable {variable}: rules are set together; "
                f"write {TOPICS_VARIABLE} as a TOML array"
            )
        else:
            # Without its value: an unknown variable may contain a secret.
            near = variable_meant(variable, known)
            builder.problem(f"unknown variable {variable}" + did_you_mean(near))
    return builder.build()


class Flag(Struct, frozen=True):
    """A setting from the command line: `--data DIR` is Flag("data", DIR, "--data")."""

    name: str
    text: str | None
    flag: str

    @classmethod
    def assigned(cls, assignment: str) -> Flag:
        """The flag for `--set key=value`."""
        name, equals, text = assignment.partition("=")
        return cls(name.strip(), text.strip() if equals else None, f"--set {name.strip()}")


def flag_layer(flags: Iterable[Flag]) -> Layer:
    """The layer of the flags. The last flag of a key takes precedence."""
    places: dict[str, str] = {}

    def locate(name: str) -> SettingSource:
        return SettingSource(Origin.FLAG, places.get(name, places.get("topics", "")))

    builder = _LayerBuilder(locate)
    for flag in flags:
        name = SHORT_NAMES.get(flag.name, flag.name)
        places[name] = flag.flag
        if flag.text is None or not flag.name:
            builder.problem(f"{flag.flag}: write --set key=value")
        elif flag.name == "topics":
            builder.add_rules_text(flag.text)
        elif flag.name.startswith("topics"):
            builder.problem(
                f"{flag.flag}: rules are set together; write --set 'topics=[{{ match = \"…\" }}]'"
            )
        elif name in PLAIN_KEYS:
            builder.add_text(name, PLAIN_KEYS[name], flag.text)
        else:
            near = key_meant(flag.name, flag.text, PLAIN_KEYS) or nearest(flag.name, ["topics"])
            what = f"unknown key {flag.name} = {shown_value(flag.text)} ({flag.flag})"
            builder.problem(what + did_you_mean(near))
    return builder.build()
