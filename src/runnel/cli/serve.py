"""`runnel serve`: the broker as a process."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from runnel.cli import diagnostics
from runnel.cli.banner import banner_lines, listening_line
from runnel.cli.diagnostics import LogFormat
from runnel.cli.settings_flags import Assignments, Config, Data, flags_of
from runnel.config import IN_MEMORY, Flag, Loaded, LogLevel, Origin, Settings, load
from runnel.errors import SettingsError
from runnel.platform.extras import has_extra, how_to_install

if TYPE_CHECKING:
    from runnel.server import Server

app = typer.Typer(add_completion=False)

_SCHEMES: Final = {"native": "runnel", "http": "http", "grpc": "grpc"}


@app.command()
def serve(
    *,
    config: Config = None,
    data: Data = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Host and port for clients, such as 127.0.0.1:7470; port 0: any free one.",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Host and port of the HTTP door; none: closed. [127.0.0.1:7480]"
        ),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Host and port of the gRPC door; none: closed. [127.0.0.1:7490]"
        ),
    ] = None,
    assignments: Assignments = None,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            help="How diagnostics are written to standard error; auto: text on a terminal, JSON elsewhere."
        ),
    ] = LogFormat.AUTO,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="What is told: this and everything above it. [info]")
    ] = None,
) -> None:
    """Run a broker until Ctrl-C or SIGTERM; SIGHUP reloads its settings.

    `runnel config show` takes the same --config, --data and --set, and prints the settings that they
    give; docs/settings.md has all of them. When it is ready it says so on standard output: "listening on runnel://…".

    At the end it finishes what it has accepted and exits with 0; a second signal does not wait for the
    clients. A broker that was started on a terminal ends so, too, when the terminal is closed.
    """
    flags = flags_of(assignments, data, listen)
    flags += [
        Flag(key, value, option)
        for key, value, option in (
            ("http.listen", http, "--http"),
            ("grpc.listen", grpc, "--grpc"),
            ("log_level", log_level, "--log-level"),
        )
        if value is not None
    ]
    loaded = load(config_path=config, flags=flags)
    _check_extras(loaded)
    diagnostics.configure(log_format, loaded.settings.log_level)
    # Imports make no garbage, and looking for some takes a tenth of their time. `run` begins to look again.
    gc.disable()
    from runnel.reloading import Reloading
    from runnel.server import run  # what is wrong with the settings is told without it

    def load_again() -> Settings:
        return load(config_path=config, flags=flags, again=True).settings

    run(
        loaded.settings,
        ready=_announce,
        reloading=Reloading(load_again, diagnostics.set_level),
    )


def _check_extras(loaded: Loaded) -> None:
    """A door that is open by default may be missing; one that somebody asked for may not."""
    for name, door in (("http", loaded.settings.http), ("grpc", loaded.settings.grpc)):
        source = loaded.sources[f"{name}.listen"]
        is_asked_for = source.origin is not Origin.DEFAULT and door.listen is not None
        if is_asked_for and not has_extra(name):
            raise SettingsError(
                f'{name}.listen = "{door.listen}" ({source}): {how_to_install(name)}'
            )


def _announce(server: Server) -> None:
    if sys.stdout is None:
        return
    addresses = [
        f"{_SCHEMES[name]}{'' if door.tls is None else 's'}://{door.address}"
        for name, door in server.doors.items()
    ]
    if sys.stdout.isatty():
        settings = server.settings
        if settings.data != IN_MEMORY:
            # Where it is, wherever somebody reads this.
            data = str(Path(settings.data).absolute())
            settings = msgspec.structs.replace(settings, data=data)
        from importlib.metadata import version

        found = server.broker.recovered
        for line in banner_lines(version("runnel"), settings, addresses, found):
            typer.echo(line)
        typer.echo("Ctrl-C ends it")
    else:
        typer.echo(listening_line(addresses))
    sys.stdout.flush()
