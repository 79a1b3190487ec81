"""Renders settings as TOML with the source of each value, and as a reference page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from runnel.config.contradictions import STORED_PARTS
from runnel.config.keys import PLAIN_KEYS, RULE_KEYS, RULE_PREFIX, Key, key_named
from runnel.config.layers import (
    OTHER_VARIABLES,
    SHORT_NAMES,
    TOPICS_VARIABLE,
    VARIABLE_PREFIX,
    SettingSource,
    flat_values,
)
from runnel.config.merger import LoadedSettings
from runnel.config.settings import Keep


class Line(Struct, frozen=True):
    """One line of the TOML text. A setting has a key and a source; a header or an empty line has neither."""

    code: str
    key: Key | None = None
    source: SettingSource | None = None


class Effective(Struct, frozen=True):
    """One effective setting with its key and source."""

    name: str
    key: Key
    value: object
    source: SettingSource


def effective(loaded: LoadedSettings) -> Iterator[Effective]:
    """Every setting with its value and source, in the order of the structs."""
    for name, value in flat_values(loaded.settings).items():
        yield Effective(name, key_named(name), value, loaded.sources[name])


def toml_lines(loaded: LoadedSettings) -> Iterator[Line]:
    """The effective settings as TOML. Used as a file, it gives the same settings again."""
    table = ""
    for setting in effective(loaded):
        first, _, rest = setting.name.partition(".")
        if rest and first != table:
            table = first
            rule, bracket, _ = first.partition("[")
            yield Line("")
            yield Line(f"[[{rule}]]" if bracket else f"[{first}]")
        if _is_without_effect(loaded, setting):
            continue
        code = f"{rest or first} = {setting.key.write(setting.value)}"
        yield Line(code, setting.key, setting.source)


def _is_without_effect(loaded: LoadedSettings, setting: Effective) -> bool:
    """Whether the setting is about storing, in a rule that stores nothing: a file must not contain it."""
    table, _, part = setting.name.partition(".")
    if not table.startswith("topics["):
        return False
    rule = loaded.settings.topics[int(table.removeprefix("topics[").removesuffix("]"))]
    return rule.keep is Keep.NONE and part.startswith(STORED_PARTS)


_REFERENCE_PAGE: Final = """\
# Settings

Written by `runnel config reference`; the descriptions are beside the structs in `runnel.config.settings`.

A setting comes from its default, then `runnel.toml`, then its environment variable, then a flag
(`--data DIR`, `--set key=value`); the last one takes precedence. `runnel config show` prints the effective
settings and their sources. The broker refuses wrong settings at its start, and names all of them in one message.

- Sizes: `"256MiB"`, `"1.5GiB"`, `"10MB"`, or a number of bytes.
- Durations: `"7d"`, `"1h30m"`, `"500ms"`; the units are w, d, h, m, s, ms, us and ns.
- Lists: `["a", "b"]`; as a variable or with `--set`, `a,b`.
- `"none"` stands for the absence of a value that may be absent.
- {short} are short for {full}, in the file outside any table; as variables, {short_variables}.

| key | default | meaning | variable |
|---|---|---|---|
{plain}

## Rules for topics

Each `[[topics]]` is a rule; the first whose `match` matches a new topic sets its policy. Rules that
share a journal must agree on `keep`, `rotate`, `retain` and `pin`. From the environment, all rules
come in `{variable}` as a TOML array: `[{{ match = "sensors/*", keep = "memory" }}]`. The rules of a
later source replace those of an earlier one.

| key | default | meaning |
|---|---|---|
{rules}

## Other variables

| variable | meaning |
|---|---|
{others}
"""


def reference_page() -> str:
    """The text of docs/settings.md."""
    return _REFERENCE_PAGE.format(
        short=_listed(SHORT_NAMES),
        full=_listed(SHORT_NAMES.values()),
        short_variables=_listed(VARIABLE_PREFIX + name.upper() for name in SHORT_NAMES),
        plain="\n".join(f"{_row(key)} `{key.variable}` |" for key in PLAIN_KEYS.values()),
        variable=TOPICS_VARIABLE,
        rules="\n".join(_row(key) for key in RULE_KEYS.values()),
        others="\n".join(f"| `{name}` | {text} |" for name, text in OTHER_VARIABLES.items()),
    )


def _listed(names: Iterable[str]) -> str:
    *most, last = (f"`{name}`" for name in names)
    return f"{', '.join(most)} and {last}"


def _row(key: Key) -> str:
    default = "required" if key.required else f"`{key.write(key.default)}`"
    return f"| `{key.name.removeprefix(RULE_PREFIX)}` | {default} | {key.description} |"
