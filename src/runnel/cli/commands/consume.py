"""`runnel consume`: processes a subscription, printing its messages or running a command for each."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from runnel.cli.command_runner import CommandRunner
from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.places import STARTS, parse_start
from runnel.cli.render.message_output import MessageOutput, check_count
from runnel.cli.render.messages import MessageFormat, escaped
from runnel.errors import ClientFault
from runnel.group_rules.definition import Mode
from runnel.topics.patterns import Pattern

if TYPE_CHECKING:
    from runnel.client import Bus, Consumer, LateWork, Work

_WINDOW: Final = 256
_WINDOW_PER_COMMAND: Final = 2  # one that runs, and the next

# Settles messages that have been printed.
_Settle: TypeAlias = "Callable[[Consumer, list[Work]], Awaitable[None]]"

app = typer.Typer(add_completion=False)


@app.command()
def consume(
    subscription: Annotated[
        str,
        typer.Argument(
            metavar="SUBSCRIPTION", help="Name of the subscription. It is created on first use."
        ),
    ],
    pattern: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATTERN", help="Topics of the subscription, such as 'orders/*'."),
    ] = None,
    *,
    mode: Annotated[
        Mode | None,
        typer.Option(help="Which consumers get a message (see above). Default: shared."),
    ] = None,
    member: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of this member of a multicast subscription."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Where a new subscription begins (see above)."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec", metavar="COMMAND", help="Run this command for each message (see above)."
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=10_000, help="Maximum number of commands that run at a time."
        ),
    ] = 1,
    no_ack: Annotated[
        bool,
        typer.Option("--no-ack", help="Do not acknowledge: give printed messages back at the end."),
    ] = False,
    nack: Annotated[
        bool,
        typer.Option(
            "--nack", help="Reject printed messages: they count as failed and are delivered again."
        ),
    ] = False,
    form: Annotated[
        MessageFormat, typer.Option("--format", help="Output format, as in `runnel sub`.")
    ] = MessageFormat.TEXT,
    window: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Maximum number of messages leased at a time. Default: 256; with --exec, twice "
            "--concurrency.",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after N messages.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Stop when no message has come for this long."),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Process the messages of a subscription, each at least once.

    Each message is printed and then acknowledged. An acknowledged message is not delivered again. Any number of
    consumers can share a subscription. When a consumer ends or fails, its unfinished messages go to other
    consumers.

    shared: any consumer gets a message. key_shared: one consumer at a time gets the messages of a key, in order.
    multicast: every --member gets every message. Without PATTERN the subscription must exist. With PATTERN, an
    existing subscription must have the same mode and topics.

    PLACE is earliest (the default, except for a new member of a multicast: latest), latest, an offset (of one
    topic), or a time: 2026-05-01T12:30:00Z, a date, or an age such as 2h.

    COMMAND runs in a shell, with the payload on standard input and MESSAGE_TOPIC, MESSAGE_PARTITION,
    MESSAGE_OFFSET, MESSAGE_KEY, MESSAGE_TAGS (JSON) and MESSAGE_ATTEMPT (1 the first time) in its environment. Exit
    code 0 acknowledges the message. After any other exit code the message is delivered again later; the last line
    of standard error becomes the reason in its dead letter. Exit codes 126 and 127, which a shell returns for a
    command that it cannot run, end `runnel consume` itself.

    The first Ctrl-C or SIGTERM starts no further commands and lets running commands finish; the second ends them.
    Unfinished messages go back and do not count as failed. With --count and --timeout, the exit code is 1 if fewer
    messages came.
    """
    patterns = tuple(pattern or ())
    for text in patterns:
        Pattern(text)  # its error says where the pattern is wrong
    if sum((command is not None, no_ack, nack)) > 1:
        raise ClientFault("--exec, --no-ack and --nack exclude each other: choose one")
    if command is not None and not command.strip():
        raise ClientFault("--exec is empty: it would acknowledge everything, and do nothing")
    begin = (
        None if start is None else parse_start("--start", start, patterns, time.time_ns(), STARTS)
    )
    if window is None:
        window = _WINDOW if command is None else _WINDOW_PER_COMMAND * concurrency
    if count is not None:
        # Leasing more than `count` messages would keep them from other consumers. --no-ack settles none, so it
        # needs all.
        window = count if no_ack else min(window, count)
    executor = (
        None
        if command is None
        else CommandRunner(command, concurrency=concurrency, count=count, timeout_s=timeout)
    )
    settle = _leave if no_ack else _nack if nack else _ack

    async def work(bus: Bus) -> int:
        async with bus.consume(
            subscription,
            *patterns,
            mode=mode,
            member=member,
            start=begin,
            window_messages=window,
            on_late=_tell_late,
        ) as consumer:
            if executor is not None:
                return await executor.run(consumer)
            return await _print_all(consumer, MessageOutput(form), settle, count, timeout)

    with _sigterm_like_ctrl_c():
        came = run_connected(url, work, tells_losses=True)
    if executor is not None and executor.interrupts:
        raise KeyboardInterrupt
    check_count(came, count, timeout)


async def _print_all(
    consumer: Consumer,
    output: MessageOutput,
    settle: _Settle,
    count: int | None,
    timeout_s: float | None,
) -> int:
    printed = 0
    while count is None or printed < count:
        try:
            async with asyncio.timeout(timeout_s):
                waiting = await consumer.next_works()
        except TimeoutError:
            break
        wanted = len(waiting) if count is None else count - printed
        begun = [work for work in waiting[:wanted] if consumer.begin_nowait(work)]
        await consumer.put_back(waiting[wanted:])
        # One write for everything that has arrived: the reader of the pipe never waits for more.
        await output.write([work.message for work in begun])
        await settle(consumer, begun)
        printed += len(begun)
    return printed


async def _ack(consumer: Consumer, printed: list[Work]) -> None:
    await consumer.ack(*printed)


async def _nack(consumer: Consumer, printed: list[Work]) -> None:
    await consumer.nack(*printed, reason="runnel consume --nack")


async def _leave(consumer: Consumer, printed: list[Work]) -> None:
    """Settle nothing: the consumer gives the messages back when it closes."""


def _tell_late(late: LateWork) -> None:
    topic = late.topic or "a topic"
    last = "" if late.end - late.begin <= 1 else f" to {late.end - 1}"
    line = f"late: {topic}[{late.partition}]@{late.begin}{last} comes again: {late.reason}"
    typer.echo(escaped(line), err=True)


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM, which service managers send, as Ctrl-C: it does not cost the messages an attempt."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
