"""The command `runnel`: finds a command by its name, runs it, and exits with its code.

A command's module is imported when the command runs. So `runnel --help` is quick, and each command loads only what
it needs.
"""

from __future__ import annotations

import sys

try:
    import errno
    import os
    from collections.abc import Sequence
    from importlib import import_module
    from typing import Annotated, Any, Final, NoReturn

    import typer
    import typer.core
    import typer.main

    from runnel.errors import ClientFault, RunnelError, Unavailable
except KeyboardInterrupt:
    # These imports take most of the time before `run` can handle Ctrl-C itself.
    print("interrupted", file=sys.stderr)
    sys.exit(130)

# Each command, or group of commands, is a module of `commands` with an `app`; here are its name and one line of
# help.
COMMANDS: Final[dict[str, str]] = {
    "serve": "Run a broker.",
    "pub": "Publish messages: arguments, lines of standard input, or a file.",
    "sub": "Print messages of matching topics as they come.",
    "poll": "Print stored messages of one topic.",
    "consume": "Process a subscription: print and acknowledge messages, or run a command for each.",
    "topics": "List, show, delete and purge topics.",
    "cursors": "List, set and remove named cursors.",
    "subscriptions": "List, show, make, pause, move and delete subscriptions.",
    "dead": "List and show dead letters; send them back or drop them.",
    "cluster": "Show the processes of a broker; move shards between them, drain one, balance.",
    "top": "Watch a broker: rates, topics, subscribers, lag, backlog, syncs.",
    "bench": "Load a broker and measure it; check for loss and disorder.",
    "log": "Inspect, verify or export a data directory.",
    "backup": "Make a verified copy of a running broker's data directory.",
    "restore": "Make a data directory from a backup.",
    "pipeline": "Archive, replay, measure and transform stored streams with Spark.",
    "token": "Make, list, change and revoke tokens.",
    "config": "Show the effective settings and their sources.",
}

# Names that users of other brokers may try.
MEANT: Final[dict[str, str]] = {
    **dict.fromkeys(("subscribe", "listen", "tail", "watch"), "sub"),
    **dict.fromkeys(("publish", "send", "produce", "producer", "emit"), "pub"),
    **dict.fromkeys(("fetch", "read", "get", "cat", "replay"), "poll"),
    **dict.fromkeys(("consumer", "work", "worker", "process"), "consume"),
    **dict.fromkeys(("ls", "list", "topic", "stream", "streams"), "topics"),
    **dict.fromkeys(("group", "groups", "queue", "queues", "subs"), "subscriptions"),
    **dict.fromkeys(("server", "start", "run", "broker", "daemon"), "serve"),
    **dict.fromkeys(("stat", "stats", "status", "monitor", "metrics"), "top"),
    **dict.fromkeys(("dlq", "dead-letters", "deadletters"), "dead"),
    **dict.fromkeys(("settings", "configure"), "config"),
    **dict.fromkeys(("tokens", "auth", "user", "users", "login"), "token"),
    **dict.fromkeys(("nodes", "node", "processes", "rebalance", "drain"), "cluster"),
    **dict.fromkeys(("benchmark", "perf"), "bench"),
    **dict.fromkeys(("sql", "archive"), "pipeline"),
    **dict.fromkeys(("export", "dump"), "log export"),
    "verify": "log verify",
    "inspect": "log inspect",
    "offsets": "cursors",
}

_STDERR: Final = 2

EXIT_FAILED: Final = 1
EXIT_CLIENT_FAULT: Final = 2
EXIT_UNAVAILABLE: Final = 3
EXIT_INTERRUPTED: Final = 130


class _LazyGroup(typer.core.TyperGroup):
    """Imports a command when it is looked up.

    Help lists commands without looking them up. Running and completing a command looks it up.
    """

    # Typer keeps the types of these arguments private.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            found: typer.Typer = import_module(f"runnel.cli.commands.{args[0]}").app
            # The same plain help everywhere, without a further import.
            found.rich_markup_mode = self.rich_markup_mode
            self.commands[args[0]] = typer.main.get_command(found)
        elif args and args[0] in MEANT:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {MEANT[args[0]]!r}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: loading rich takes longer than everything else together
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _help in COMMANDS.items():
    app.add_typer(typer.Typer(), name=_name, help=_help)


def _print_version(value: bool) -> None:  # noqa: FBT001 - the signature of an option's callback
    if value:
        from importlib.metadata import version  # rarely needed, and slow to import

        typer.echo(f"runnel {version('runnel')}")
        raise typer.Exit


@app.callback()
def _runnel(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """A message broker that starts with one command and hands its data to Spark."""


def main() -> NoReturn:
    """The entry point: run the command in this process's arguments, and exit."""
    _fill_standard_streams()
    sys.exit(run(sys.argv[1:]))


def _fill_standard_streams() -> None:
    """Open /dev/null for each standard stream that is closed, so that no other file gets its descriptor.

    libuv aborts the process when it closes one of those descriptors. At this point Python has noted which streams
    are closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - as the standard library has it
    os.close(descriptor)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. A failure prints a message, not a traceback.

    A bug prints its traceback: a bug report needs it.
    """
    has_printed = False
    try:
        code = _run_command(arguments)
    except RunnelError as error:
        _print_error(error)
        code = exit_code_of(error)
    except OSError as error:
        _print_error(_named(error))
        code = EXIT_FAILED
        has_printed = True
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code if _flush_output(is_quiet=has_printed) else code or EXIT_FAILED


def exit_code_of(error: RunnelError) -> int:
    """2: the request or the settings are wrong; 3: try again later; 1: any other error."""
    match error:
        case ClientFault():
            return EXIT_CLIENT_FAULT
        case Unavailable():
            return EXIT_UNAVAILABLE
        case _:
            return EXIT_FAILED


def _run_command(arguments: Sequence[str]) -> int:
    command = typer.main.get_command(app)
    try:
        command.main(args=list(arguments), prog_name="runnel")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else EXIT_FAILED
    return 0


def _print_error(error: Exception) -> None:
    # Errors quote user input, which must not control the terminal.
    text = "".join(char if char.isprintable() or char == "\n" else "?" for char in str(error))
    print(f"error: {text}", file=sys.stderr)


def _named(error: OSError) -> OSError:
    """Name standard output in a disk-full error without a file: commands name every file that they write."""
    if error.errno != errno.ENOSPC or error.filename is not None:
        return error
    return OSError(error.errno, error.strerror, "standard output")


def _flush_output(*, is_quiet: bool) -> bool:
    """Flush standard output; return whether that worked. A reader that left early (`… | head`) gets no message."""
    if sys.stdout is None:  # closed by the process that started this one
        return True
    try:
        sys.stdout.flush()
    except OSError as error:
        # The rest must go somewhere, or the interpreter complains about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not is_quiet and not isinstance(error, BrokenPipeError):
            _print_error(_named(error))
        return False
    return True
