"""`runnel serve`: runs a broker, in this process or in several."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from runnel.cli import diagnostics
from runnel.cli.diagnostics import LogFormat
from runnel.cli.render.banner import banner_lines, listening_line
from runnel.cli.settings_options import Assignments, Config, Data, flags_of
from runnel.config import (
    AUTO,
    IN_MEMORY,
    SHARDS_OF_SEVERAL,
    Flag,
    LoadedSettings,
    LogLevel,
    Origin,
    Settings,
    load,
)
from runnel.errors import SettingsError
from runnel.platform.extras import has_extra, how_to_install
from runnel.platform.process import available_cores

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
            help="Host and port for native clients, such as 127.0.0.1:7470. Port 0: any free port.",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Host and port of the HTTP listener. none: no HTTP listener. [127.0.0.1:7480]",
        ),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Host and port of the gRPC listener. none: no gRPC listener. [127.0.0.1:7490]",
        ),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Processes that serve the data directory together. auto: one for each core. [1]",
        ),
    ] = None,
    assignments: Assignments = None,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            help="Format of the log on standard error. auto: text on a terminal, JSON otherwise."
        ),
    ] = LogFormat.AUTO,
    log_level: Annotated[LogLevel | None, typer.Option(help="Lowest level to log. [info]")] = None,
) -> None:
    """Run a broker until Ctrl-C or SIGTERM. SIGHUP reloads its settings.

    `runnel config show` takes the same --config, --data and --set, and prints the resulting settings.
    docs/settings.md describes all settings. When the broker is ready, it prints "listening on runnel://…" on
    standard output.

    When it stops, the broker finishes the requests that it has accepted and exits with code 0. After a second
    signal it does not wait for clients. A broker that was started on a terminal also stops when the terminal is
    closed.
    """
    flags = flags_of(assignments, data, listen)
    flags += [
        Flag(key, value, option)
        for key, value, option in (
            ("http.listen", http, "--http"),
            ("grpc.listen", grpc, "--grpc"),
            ("cluster.processes", processes, "--processes"),
            ("log_level", log_level, "--log-level"),
        )
        if value is not None
    ]
    loaded = load(config_path=config, flags=flags)
    _check_extras(loaded)
    settings = loaded.settings

    def load_again() -> Settings:
        return load(config_path=config, flags=flags, again=True).settings

    if (count := _process_count(settings)) is not None:
        raise typer.Exit(_serve_several(settings, count, log_format, load_again))
    diagnostics.configure(log_format, settings.log_level)
    # Imports create no garbage, and collecting takes a tenth of their time. `run` enables the collector again.
    gc.disable()
    from runnel.server import run  # errors in the settings are reported without this import
    from runnel.settings_reload import SettingsReload

    run(
        settings,
        ready=_announce_server,
        settings_reload=SettingsReload(load_again, diagnostics.set_level),
    )


def _process_count(settings: Settings) -> int | None:
    """The number of child processes; None: this process serves."""
    count = settings.cluster.processes
    if count == AUTO:
        count = min(available_cores(), SHARDS_OF_SEVERAL)
    return None if count == 1 else count


def _serve_several(
    settings: Settings, count: int, log_format: LogFormat, load_again: Callable[[], Settings]
) -> int:
    """Serve with several processes; returns the exit code."""
    from runnel.processes import parent
    from runnel.processes.directory import ParentDirectory

    log_format = diagnostics.resolved(log_format)
    diagnostics.configure(log_format, settings.log_level)

    def announce(addresses: Mapping[str, str], found: Sequence[str]) -> None:
        _announce(settings, addresses, found)

    setup = parent.ParentSetup(
        settings=settings,
        count=count,
        command=(sys.executable, "-P", "-m", "runnel.cli.child"),
        log_format=log_format,
        load=load_again,
        set_log_level=diagnostics.set_level,
        announce=announce,
        open_directory=ParentDirectory.open,
        rules=parent.supervision_rules(settings),
    )
    return parent.run_parent(setup)


def _check_extras(loaded: LoadedSettings) -> None:
    """An optional listener that is on by default may lack its extra; one that the user configured may not."""
    for name, listener in (("http", loaded.settings.http), ("grpc", loaded.settings.grpc)):
        source = loaded.sources[f"{name}.listen"]
        is_asked_for = source.origin is not Origin.DEFAULT and listener.listen is not None
        if is_asked_for and not has_extra(name):
            raise SettingsError(
                f'{name}.listen = "{listener.listen}" ({source}): {how_to_install(name)}'
            )


def _announce_server(server: Server) -> None:
    _announce(server.settings, server.addresses, server.broker.recovered)


def _announce(settings: Settings, addresses: Mapping[str, str], found: Sequence[str]) -> None:
    if sys.stdout is None:
        return
    certificates = {
        "native": settings.native.tls_certificate,
        "http": settings.http.tls_certificate,
        "grpc": settings.grpc.tls_certificate,
    }
    urls = [
        f"{_SCHEMES[name]}{'' if certificates[name] is None else 's'}://{address}"
        for name, address in addresses.items()
    ]
    if sys.stdout.isatty():
        if settings.data != IN_MEMORY:
            # The absolute path, which is valid wherever a user reads it.
            data = str(Path(settings.data).absolute())
            settings = msgspec.structs.replace(settings, data=data)
        from importlib.metadata import version

        for line in banner_lines(version("runnel"), settings, urls, found):
            typer.echo(line)
        typer.echo("Ctrl-C ends it")
    else:
        typer.echo(listening_line(urls))
    sys.stdout.flush()
