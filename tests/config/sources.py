"""Settings from texts, as `load` would merge them, without touching files or the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from runnel.config import Flag, LoadedSettings, Settings, merge
from runnel.config.layers import default_layer, environment_layer, file_layer, flag_layer
from runnel.errors import SettingsError


def merged(
    toml: str = "",
    environment: Mapping[str, str] | None = None,
    assignments: Sequence[str] = (),
    defaults: Settings | None = None,
) -> LoadedSettings:
    return merge(
        default_layer(defaults or Settings()),
        file_layer(toml, "runnel.toml"),
        environment_layer(environment or {}),
        flag_layer([Flag.assigned(assignment) for assignment in assignments]),
    )


def problems(
    toml: str = "", environment: Mapping[str, str] | None = None, assignments: Sequence[str] = ()
) -> list[str]:
    """The lines of the error that these sources must lead to, one a problem."""
    with pytest.raises(SettingsError) as refused:
        merged(toml, environment, assignments)
    first, *rest = str(refused.value).splitlines()
    if not rest:
        return [first]
    assert first == f"the settings have {len(rest)} problems:"
    return [line.removeprefix("  ") for line in rest]
