"""`runnel config`: prints the effective settings with their sources, and the reference of all settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Annotated, Final

import typer

from runnel.cli.settings_options import Assignments, Config, Data, flags_of
from runnel.config import LoadedSettings, load
from runnel.config.renderer import Line, effective, reference_page, toml_lines
from runnel.topics.policies import Policies

_COMMENT_COLUMN_MAX: Final = 48

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _config() -> None:
    """Show the effective settings and their sources."""


@app.command()
def show(
    *,
    config: Config = None,
    data: Data = None,
    assignments: Assignments = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the meaning of each setting above it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Print the effective settings and the source of each.

    The output is TOML. Used as a settings file, it gives the same settings.
    """
    loaded = load(config_path=config, flags=flags_of(assignments, data))
    # Patterns, names and journals are checked when policies are made. A broker would refuse the same settings.
    Policies(loaded.settings.topics, partitions_max=loaded.settings.limits.partitions_max)
    if as_json:
        typer.echo(_json_text(loaded))
        return
    # Typer strips colours if the output is not a terminal. NO_COLOR strips them on a terminal too.
    colour = False if os.environ.get("NO_COLOR") else None
    for text in _styled(list(toml_lines(loaded)), explain=explain):
        typer.echo(text, color=colour)


@app.command()
def reference() -> None:
    """Print the meaning of every setting as Markdown."""
    typer.echo(reference_page(), nl=False)


def _styled(lines: list[Line], *, explain: bool) -> Iterator[str]:
    # One long pattern must not push every comment off the screen.
    width = min(max(len(line.code) for line in lines), _COMMENT_COLUMN_MAX)
    for line in lines:
        if line.key is None or line.source is None:
            yield typer.style(line.code, bold=True)
            continue
        if explain:
            yield typer.style(f"# {line.key.description}", dim=True)
        comment = typer.style(f"# {line.source}", dim=True)
        yield f"{line.code:<{width}}  {comment}"


def _json_text(loaded: LoadedSettings) -> str:
    settings = {
        setting.name: {
            "value": setting.value,
            "written": json.loads(setting.key.write(setting.value)),
            "origin": setting.source.origin,
            "place": setting.source.place or None,
        }
        for setting in effective(loaded)
    }
    return json.dumps(settings, indent=2, ensure_ascii=False)
