"""`runnel log`: inspects, verifies and exports a data directory, whether a broker uses it or not."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
import typer

from runnel.cli.export import STANDARD_OUTPUT, ExportSink, naming, sink_maker, whole_file
from runnel.cli.options import Json, parse_tags
from runnel.cli.render import inspection
from runnel.cli.render.tables import counted, human_bytes, json_text, printable
from runnel.cli.render.times import parse_time
from runnel.errors import ClientFault
from runnel.log.reading import OfflineLog, Selection, Verified
from runnel.log.reading import verify as verify_log
from runnel.topics.patterns import Pattern

app = typer.Typer(no_args_is_help=True, add_completion=False)

_SHOW_EVERY_SECONDS: Final = 0.1

Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="A data directory, or a copy of one.")
]


class WhichTime(enum.StrEnum):
    """The time that --since and --until compare."""

    RECEIVE = "receive"
    EVENT = "event"


@app.callback()
def _log() -> None:
    """Inspect, verify or export a data directory.

    These commands only read, take no lock and need no broker. A running broker is not disturbed. Of the data that
    it is writing, they see only what is known to be synced.
    """


def _open(directory: str) -> OfflineLog:
    path = Path(directory)
    if not path.exists():
        raise ClientFault(f"no such directory: {directory}")
    if not path.is_dir():
        raise ClientFault(f"{directory} is not a directory")
    return OfflineLog(directory)


# --- inspect ---


@app.command()
def inspect(
    directory: Directory,
    *,
    topics: Annotated[
        bool,
        typer.Option("--topics", help="Also list topics with their offsets. Reads all indexes."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the contents of a data directory.

    Prints journals and their segments with sizes, batches and times; cursors; and whether a process has the
    directory open. This is quick for any amount of data: it reads the headers of indexes, and scans only segments
    that are still growing.
    """
    found = inspection.inspect(_open(directory), with_topics=topics)
    if as_json:
        typer.echo(inspection.as_json(found))
    else:
        inspection.show(found)


# --- verify ---


@app.command()
def verify(directory: Directory, *, as_json: Json = False) -> None:
    """Check every checksum and every index.

    Damage is printed as FILE:POSITION: PROBLEM, and the exit code is then 1. Notes are not damage. For example, a
    crash may leave a torn tail at the end of a journal: it was never acknowledged, and the next start of a broker
    cuts it off.
    """
    log = _open(directory)
    started = time.monotonic()
    with _byte_progress("verifying") as on_progress:
        found = verify_log(log, on_progress)
    seconds = time.monotonic() - started
    if as_json:
        typer.echo(_verified_json(found, seconds))
    else:
        _show_verified(found, seconds)
    if found.damage_count:
        raise typer.Exit(1)


def _verified_json(found: Verified, seconds: float) -> str:
    document = {
        "is_sound": not found.damage_count,
        **msgspec.to_builtins(found),
        "seconds": seconds,
    }
    return json_text(document)


def _show_verified(found: Verified, seconds: float) -> None:
    for note in found.notes:
        typer.echo(f"note: {printable(note)}")
    for damage in found.damage:
        typer.echo(printable(str(damage)))
    if found.damage_count > len(found.damage):
        typer.echo(f"… and {found.damage_count - len(found.damage):,} more")
    rate = human_bytes(found.bytes / seconds if seconds else 0)
    verdict = (
        counted(found.damage_count, "place of damage", "places of damage")
        if found.damage_count
        else "no damage"
    )
    typer.echo(
        f"{verdict}: {counted(found.segments, 'segment')}, {counted(found.messages, 'message')}, "
        f"{human_bytes(found.bytes)} in {seconds:.2f} s ({rate}/s)"
    )


@contextmanager
def _byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error if that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    # Rarely needed, and slow to import.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    with Progress(
        TextColumn(what),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


# --- export ---


@app.command()
def export(
    directory: Directory,
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="file.parquet, file.arrow or file.jsonl. -: JSON lines on standard output.",
        ),
    ],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB", help="Export topics that match, such as 'sensors/*'. Repeatable."
        ),
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=0, help="Export only this partition. Repeatable."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Export messages of this time or later.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Export messages before this time.")
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Export only messages with this tag. Repeatable: all tags must match.",
        ),
    ] = None,
    which_time: Annotated[
        WhichTime, typer.Option("--time", help="The time that --since and --until compare.")
    ] = WhichTime.RECEIVE,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Stop after N messages.")
    ] = None,
) -> None:
    """Write messages to a file.

    Without --topic, all topics are exported except system topics. Use --topic '!*' for those.

    TIME is 2026-05-01T12:30:00Z (any zone, up to nine decimals; UTC without a zone), a date (its midnight in UTC),
    an age such as 2h or 7d, or nanoseconds since 1970.

    Only blocks that may contain such messages are read. Purged and deleted messages are not exported. Messages past
    their retention are exported while their files exist. The file gets its name when it is complete, and replaces
    an older file of that name. Damage is reported on standard error, and the exit code is then 1; all undamaged
    messages are exported.

    In JSON lines, a payload or key that is not UTF-8 is base64, and payload_encoding or key_encoding says so. Each
    time is written twice: as text and as nanoseconds.
    """
    log = _open(directory)
    selection = _selection(topic, partition, tag, since, until, which_time)
    make_sink = sink_maker(to)
    if to == STANDARD_OUTPUT and sys.stdout is None:
        raise ClientFault("--to -: standard output is closed")
    if to != STANDARD_OUTPUT and Path(to).resolve().is_relative_to(Path(directory).resolve()):
        raise ClientFault(f"--to {to} lies in the data directory, which is the broker's alone")

    def run(out: BinaryIO) -> int:
        sink = make_sink(out, lambda: [found.name for found in log.topics(selection.topics)])
        try:
            return _export_all(log, selection, limit, sink, where)
        except BaseException:
            sink.abandon()
            raise

    where = "standard output" if to == STANDARD_OUTPUT else to
    started = time.monotonic()
    if to == STANDARD_OUTPUT:
        messages = run(sys.stdout.buffer)
    else:
        with whole_file(Path(to)) as out:
            messages = run(out)
    _tell_exported(log, to, messages, time.monotonic() - started)
    if log.report.damage_count:
        raise typer.Exit(1)


def _selection(
    topics: Sequence[str] | None,
    partitions: Sequence[int] | None,
    tags: Sequence[str] | None,
    since: str | None,
    until: str | None,
    which_time: WhichTime,
) -> Selection:
    for text in topics or ():
        Pattern(text)  # its error says where the pattern is wrong
    now_ns = time.time_ns()
    since_ns = None if since is None else parse_time("--since", since, now_ns)
    until_ns = None if until is None else parse_time("--until", until, now_ns)
    if since_ns is not None and until_ns is not None and since_ns >= until_ns:
        raise ClientFault(f"--since {since} is not before --until {until}: nothing lies between")
    is_event = which_time is WhichTime.EVENT
    return Selection(
        topics=tuple(topics or ("*",)),
        partitions=frozenset(partitions) if partitions else None,
        tags=parse_tags("--tag", tags or ()),
        since_ns=None if is_event else since_ns,
        until_ns=None if is_event else until_ns,
        event_since_ns=since_ns if is_event else None,
        event_until_ns=until_ns if is_event else None,
    )


def _export_all(
    log: OfflineLog, selection: Selection, limit: int | None, sink: ExportSink, where: str
) -> int:
    messages = 0
    with _count_progress() as show:
        for batch in log.scan(selection) if limit != 0 else ():
            part = batch
            if limit is not None and messages + len(batch) > limit:
                part = batch.slice(0, limit - messages)
            with naming(where):
                sink.write(part)
            messages += len(part)
            show(messages)
            if messages == limit:
                break
        with naming(where):
            sink.finish()
    return messages


@contextmanager
def _count_progress() -> Iterator[Callable[[int], None]]:
    """Show a counter on standard error if that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _messages: None
        return
    from rich.console import Console  # rarely needed, and slow to import

    shown_at = time.monotonic()

    def show(messages: int) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at >= _SHOW_EVERY_SECONDS:
            shown_at = time.monotonic()
            status.update(f"exporting: {messages:,} messages")

    with Console(stderr=True).status("exporting") as status:
        yield show


def _tell_exported(log: OfflineLog, to: str, messages: int, seconds: float) -> None:
    """Print the result on standard error: standard output may contain the export."""
    is_file = to != STANDARD_OUTPUT
    where = f"{to}, {human_bytes(Path(to).stat().st_size)}" if is_file else "standard output"
    typer.echo(f"{counted(messages, 'message')} to {where}, in {seconds:.2f} s", err=True)
    report = log.report
    for path in report.gone:
        gone = f"retention removed segment {path} while it was read: messages are missing"
        typer.echo(f"note: {printable(gone)}", err=True)
    for note in (*report.torn, *report.withheld):
        typer.echo(f"note: {printable(str(note))}", err=True)
    for damage in report.damage:
        typer.echo(f"damage: {printable(str(damage))}; not exported", err=True)
