"""Loads the settings. The only module that reads the settings file and the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from runnel.config.layers import (
    CONFIG_VARIABLE,
    Flag,
    Layer,
    default_layer,
    environment_layer,
    file_layer,
    flag_layer,
)
from runnel.config.merger import LoadedSettings, merge
from runnel.config.settings import Settings

DEFAULT_PATH: Final = "runnel.toml"


def load(
    *,
    config_path: str | None = None,
    flags: Iterable[Flag] = (),
    environment: Mapping[str, str] | None = None,
    defaults: Settings | None = None,
    again: bool = False,
) -> LoadedSettings:
    """Load the settings from all sources. SettingsError names everything that is wrong with them.

    Defaults, then the file, then `RUNNEL_*` variables, then flags: a later source takes precedence.

    The file is `config_path`, else the file that RUNNEL_CONFIG names, else ./runnel.toml if it exists. A file that is
    named must exist. `again` (for a reload) refuses a pipe, which can be read only once.
    """
    if environment is None:
        environment = os.environ
    asked_by = "--config" if config_path is not None else CONFIG_VARIABLE
    path = config_path if config_path is not None else environment.get(CONFIG_VARIABLE)
    return merge(
        default_layer(defaults if defaults is not None else Settings()),
        _read_default_file() if path is None else _read_file(path, asked_by, again=again),
        environment_layer(environment),
        flag_layer(flags),
    )


def _read_default_file() -> Layer:
    return _read_file(DEFAULT_PATH, "default") if Path(DEFAULT_PATH).exists() else Layer()


def _read_file(path: str, asked_by: str, *, again: bool = False) -> Layer:
    # A file that cannot be read becomes a problem, so that the problems of other sources are reported too.
    try:
        if again and Path(path).is_fifo():
            problem = "a pipe cannot be read again; a file could"
            return Layer(problems=(f"{path} ({asked_by}): {problem}",))
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        return Layer(problems=(f"{path} ({asked_by}): cannot read the settings file: {reason}",))
    except UnicodeDecodeError as error:
        return Layer(problems=(f"{path}: not UTF-8 at byte {error.start}",))
    except ValueError as error:
        return Layer(problems=(f"{path!r} ({asked_by}): not a path: {error}",))
    return file_layer(text, path)
