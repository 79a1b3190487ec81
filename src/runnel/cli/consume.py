"""`runnel consume`: works through a subscription, printing its messages or running a command for each."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from runnel.cli.connecting import DEFAULT_URL, Url, run_connected
from runnel.cli.executing import Executor
from runnel.cli.messages import Format, escaped
from runnel.cli.places import STARTS, parse_start
from runnel.cli.printing import MessageOutput, check_count
from runnel.errors import ClientFault
from runnel.group_rules.definition import Mode
from runnel.topics.patterns import Pattern

if TYPE_CHECKING:
    from runnel.client import Bus, Consumer, LateWork, Work

_WINDOW: Final = 256
_WINDOW_PER_COMMAND: Final = 2  # one that runs, and the next

# What becomes of messages once they are printed.
_Settle: TypeAlias = "Callable[[Consumer, list[Work]], Awaitable[None]]"

app = typer.Typer(add_completion=False)


@app.command()
def consume(
    subscription: Annotated[
        str, typer.Argument(metavar="SUBSCRIPTION", help="Its name. It is made on first use.")
    ],
    pattern: Annotated[
        list[str] | None,
        typer.Argument(metavar="PATTERN", help="Its topics, such as 'orders/*'."),
    ] = None,
    *,
    mode: Annotated[
        Mode | None, typer.Option(help="Who gets what; see above. Default: shared.")
    ] = None,
    member: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who this is, in a multicast.")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="PLACE", help="Where it begins, if it is made now; see above."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="COMMAND", help="Run this for each message; see above."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(metavar="N", min=1, max=10_000, help="How many commands run at a time.")
    ] = 1,
    no_ack: Annotated[
        bool, typer.Option("--no-ack", help="Only look: what was printed goes back at the end.")
    ] = False,
    nack: Annotated[
        bool, typer.Option("--nack", help="What was printed counts as failed, and comes again.")
    ] = False,
    form: Annotated[Format, typer.Option("--format", help="As with `runnel sub`.")] = Format.TEXT,
    window: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Most messages leased at a time. Default: 256; with --exec twice --concurrency.",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="End after so many messages.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="End when nothing has come for so long."),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Work through a subscription: every message is processed at least once, whatever dies.

    Each message is printed and then acknowledged; an acknowledged one does not come again. Any number of
    consumers may share a subscription. What one of them has not finished when it ends goes to others.

    shared gives a message to any consumer; key_shared gives those of one key to one at a time, in order;
    multicast gives every message to every --member. Without PATTERN the subscription must exist; with
    it, mode and topics must be those that it was made with.

    PLACE is earliest (the default; of a new member of a multicast latest), latest, an offset (of one
    topic), or a time: 2026-05-01T12:30:00Z, a date, or an age such as 2h.

    COMMAND runs in a shell with the payload on its standard input, and MESSAGE_TOPIC,
    MESSAGE_PARTITION, MESSAGE_OFFSET, MESSAGE_KEY, MESSAGE_TAGS (JSON) and MESSAGE_ATTEMPT (1 the first
    time) in its environment. Exit code 0 acknowledges the message. After any other it comes again later;
    the last line on standard error is the reason that its dead letter has. 126 and 127, which a shell
    returns for a command that cannot be run, end everything instead.

    Ctrl-C and SIGTERM begin nothing more and let commands that run finish; a second one ends them. What
    was not done goes back and does not count as failed. With --count and --timeout the exit code is 1
    if fewer messages came.
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
        # What comes beyond it would only be kept from others. Looking without settling needs all of it.
        window = count if no_ack else min(window, count)
    executor = (
        None
        if command is None
        else Executor(command, concurrency=concurrency, count=count, timeout_s=timeout)
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
        # Everything that has arrived in one write: a reader of the pipe is never kept waiting for more.
        await output.write([work.message for work in begun])
        await settle(consumer, begun)
        printed += len(begun)
    return printed


async def _ack(consumer: Consumer, printed: list[Work]) -> None:
    await consumer.ack(*printed)


async def _nack(consumer: Consumer, printed: list[Work]) -> None:
    await consumer.nack(*printed, reason="runnel consume --nack")


async def _leave(consumer: Consumer, printed: list[Work]) -> None:
    """Leaving the consumer gives it back."""


def _tell_late(late: LateWork) -> None:
    topic = late.topic or "a topic"
    last = "" if late.end - late.begin <= 1 else f" to {late.end - 1}"
    told = f"late: {topic}[{late.partition}]@{late.begin}{last} comes again: {late.reason}"
    typer.echo(escaped(told), err=True)


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Whatever runs this as a service ends it with SIGTERM, and shall not cost the messages an attempt."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
