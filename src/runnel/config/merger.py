"""Merges the four layers into one frozen `Settings`, or raises one error that names every problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from runnel.config.contradictions import find_contradictions
from runnel.config.keys import RULE_KEYS
from runnel.config.layers import DEFAULT_SOURCE, Given, Layer, Origin, SettingSource
from runnel.config.settings import SHARDS_OF_SEVERAL, LogSettings, Settings
from runnel.errors import SettingsError


class LoadedSettings(Struct, frozen=True):
    """The effective settings, and the source of each.

    The keys of `sources` are dotted names in the order of the structs: `limits.tags_max`, `topics[0].retain.age`.
    """

    settings: Settings
    sources: Mapping[str, SettingSource]


def merge(defaults: Layer, file: Layer, environment: Layer, flags: Layer) -> LoadedSettings:
    """Merge key by key; a later layer takes precedence. The list of rules is replaced as a whole."""
    values = dict(defaults.values)
    rule_count = defaults.rule_count or 0
    problems: list[str] = []
    faulty: set[str] = set()
    for layer in (file, environment, flags):
        problems += layer.problems
        faulty |= layer.faulty
        if layer.rule_count is not None:
            rule_count = layer.rule_count
            values = {name: each for name, each in values.items() if not _is_of_rule(name)}
        values.update(layer.values)
    values = _complete_rules(values, rule_count)
    _follow_processes(values)
    # A faulty key has no value to compare with.
    problems += [
        found.text
        for found in find_contradictions(values, rule_count)
        if faulty.isdisjoint(found.keys)
    ]
    if problems:
        raise SettingsError(_problems_text(problems))
    settings = msgspec.convert(_nested(values, rule_count), Settings)
    return LoadedSettings(settings, {name: given.source for name, given in values.items()})


def _is_of_rule(name: str) -> bool:
    return name.startswith("topics[")


def _follow_processes(values: dict[str, Given]) -> None:
    """Let new journals have shards for several processes, unless a number was set."""
    shards = values["log.journal_shards"]
    is_default = shards.source.origin is Origin.DEFAULT
    if (
        is_default
        and shards.value == LogSettings().journal_shards
        and values["cluster.processes"].value != 1
    ):
        values["log.journal_shards"] = Given(SHARDS_OF_SEVERAL, DEFAULT_SOURCE)


def _complete_rules(values: Mapping[str, Given], rule_count: int) -> dict[str, Given]:
    """The same values with the defaults of every rule filled in, in the order of the structs."""
    complete = {name: given for name, given in values.items() if not _is_of_rule(name)}
    for index in range(rule_count):
        for part, key in RULE_KEYS.items():
            name = f"topics[{index}].{part}"
            default = "" if key.required else key.default
            complete[name] = values.get(name, Given(default, DEFAULT_SOURCE))
    return complete


def _nested(values: Mapping[str, Given], rule_count: int) -> dict[str, Any]:
    rules: list[dict[str, Any]] = [{} for _ in range(rule_count)]
    root: dict[str, Any] = {"topics": rules}
    for name, given in values.items():
        first, *path = name.split(".")
        if _is_of_rule(name):
            table = rules[int(first.removeprefix("topics[").removesuffix("]"))]
        else:
            table = root
            path = [first, *path]
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = given.value
    return root


def _problems_text(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join([f"the settings have {len(problems)} problems:", *problems])
