"""`runnel pub`: publishes arguments, lines of standard input, or a file, and counts them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from runnel.cli import payloads
from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.options import level_option, parse_tags
from runnel.cli.payloads import Payloads, Read
from runnel.cli.render.tables import counted, human_bytes
from runnel.cli.render.times import parse_time
from runnel.errors import ClientFault
from runnel.log.log import Level

if TYPE_CHECKING:
    from runnel.client import Bus

_BATCH_MAX: Final = 65_536
# Messages to send before waiting for room in the publisher's buffer.
_SEND_MAX: Final = 1000

app = typer.Typer(add_completion=False)


class Labels(msgspec.Struct, frozen=True):
    """Everything that the messages of one run have in common."""

    topic: str
    key: bytes | None
    tags: dict[str, str] | None
    event_time_ns: int | None
    level: Level | None
    batch: int


class PublishCount(msgspec.Struct):
    """What was published so far."""

    messages: int = 0
    bytes: int = 0


@app.command()
def pub(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to publish to.")],
    payload: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PAYLOAD",
            help="Payloads, one message each. Without any: lines of standard input.",
        ),
    ] = None,
    *,
    key: Annotated[str | None, typer.Option(metavar="TEXT", help="Key of the messages.")] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Tag of the messages. Repeatable."),
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Publish the lines of this file.")
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Publish the whole input as one message, not one per line."),
    ] = False,
    level: Annotated[
        Level | None,
        level_option("What to wait for. Default: stored on disk topics, received on others."),
    ] = None,
    event_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Event time of the messages. Default: now.")
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=_BATCH_MAX, help="Maximum number of messages in a batch."
        ),
    ] = 1000,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no summary.")] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Publish messages.

    Each PAYLOAD is one message. Without PAYLOAD, each line of standard input or of --file is one message. The
    number of messages is printed on standard error.

    TIME is 2026-05-01T12:30:00Z, a date, an age such as 2h, or nanoseconds since 1970.
    """
    if payload and (file is not None or raw):
        raise ClientFault(
            f"payloads were given as arguments, so {'--raw' if file is None else '--file'} has no "
            "effect; leave one of them out"
        )
    labels = Labels(
        topic,
        None if key is None else os.fsencode(key),
        parse_tags("--tag", tag or ()) or None,
        None if event_time is None else parse_time("--event-time", event_time, time.time_ns()),
        level,
        batch,
    )
    started = time.monotonic()
    with _source(payload or (), file, is_raw=raw) as source:
        published = run_connected(url, lambda bus: _publish(bus, labels, source))
    if not quiet:
        typer.echo(_summary(published, time.monotonic() - started), err=True)


async def _publish(bus: Bus, labels: Labels, source: Payloads) -> PublishCount:
    published = PublishCount()
    async with bus.publisher(
        labels.topic, level=labels.level, batch_messages_max=labels.batch
    ) as publisher:
        async for some in source:
            for begin in range(0, len(some), _SEND_MAX):
                part = some[begin : begin + _SEND_MAX]
                for payload in part:
                    publisher.send(
                        payload,
                        key=labels.key,
                        tags=labels.tags,
                        event_time_ns=labels.event_time_ns,
                    )
                await publisher.ready()
                published.messages += len(part)
                published.bytes += sum(map(len, part))
        await publisher.flush()
    return published


# --- Input ---


@contextmanager
def _source(arguments: Sequence[str], file: str | None, *, is_raw: bool) -> Iterator[Payloads]:
    if arguments:
        yield payloads.of_arguments(arguments)
    elif file is None:
        if sys.stdin is None:
            raise ClientFault("standard input is closed; give payloads as arguments or --file")
        yield _parted(payloads.standard_input(), "standard input", is_raw=is_raw)
    else:
        with ExitStack() as stack:
            descriptor = _open(file)
            stack.callback(os.close, descriptor)
            on_read = stack.enter_context(_progress(file, os.fstat(descriptor).st_size))
            yield _parted(payloads.file_reader(descriptor, on_read), file, is_raw=is_raw)


def _parted(read: Read, source: str, *, is_raw: bool) -> Payloads:
    return payloads.of_whole(read, source) if is_raw else payloads.of_lines(read)


def _open(file: str) -> int:
    if Path(file).is_dir():
        raise ClientFault(f"--file {file}: it is a directory")
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ClientFault(f"--file {file}: {error.strerror}") from None


@contextmanager
def _progress(file: str, size: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _read: None
        return
    # Rarely needed, and slow to import.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(file, total=size or None)
        yield lambda read: progress.update(task, advance=read)


def _summary(published: PublishCount, seconds: float) -> str:
    rate = f" ({published.messages / seconds:,.0f} messages/s)" if published.messages > 1 else ""
    return (
        f"{counted(published.messages, 'message')}, {human_bytes(published.bytes)} in "
        f"{seconds:.2f} s{rate}"
    )
