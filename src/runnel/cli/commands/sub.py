"""`runnel sub`: prints messages of all topics that match a pattern, as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Annotated

import typer

from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.places import parse_start
from runnel.cli.render.message_output import MessageOutput, check_count, tell_gap
from runnel.cli.render.messages import MessageFormat
from runnel.topics.patterns import Pattern

if TYPE_CHECKING:
    from runnel.client import Bus, Subscription

app = typer.Typer(add_completion=False)


@app.command()
def sub(
    pattern: Annotated[
        list[str], typer.Argument(metavar="PATTERN", help="Topics to read, such as 'sensors/*'.")
    ],
    *,
    begin: Annotated[
        str, typer.Option("--from", metavar="PLACE", help="Where to begin (see above).")
    ] = "latest",
    form: Annotated[
        MessageFormat, typer.Option("--format", help="Output format (see above).")
    ] = MessageFormat.TEXT,
    count: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Stop after N messages.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Stop when no message has come for this long."),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Print messages as they come, one per line.

    PATTERN is a topic or a glob: * matches any characters (also /), ? one character, [a-z] one of a set. Quote it,
    or the shell expands it to files. System topics begin with !, and only patterns that begin with ! match them.

    PLACE is latest (only new messages), last (new messages and the last message of each topic), earliest
    (everything that is stored), an offset (of one topic), or a time: 2026-05-01T12:30:00Z, a date, or an age such
    as 2h.

    text is for people: control characters are escaped. json has every field; a payload that is not UTF-8 is base64,
    and payload_encoding says so. raw is the unchanged payload only.

    Missed messages are reported on standard error. With --count and --timeout, the exit code is 1 if fewer messages
    came.
    """
    for text in pattern:
        Pattern(text)  # its error says where the pattern is wrong
    start = parse_start("--from", begin, pattern, time.time_ns())
    output = MessageOutput(form)

    def print_all(bus: Bus) -> Awaitable[int]:
        subscription = bus.subscribe(*pattern, start=start, on_gap=tell_gap)
        return _print_all(subscription, output, count, timeout)

    check_count(run_connected(url, print_all, tells_losses=True), count, timeout)


async def _print_all(
    subscription: Subscription, output: MessageOutput, count: int | None, timeout_s: float | None
) -> int:
    printed = 0
    async with subscription:
        while count is None or printed < count:
            try:
                async with asyncio.timeout(timeout_s):
                    batches = await subscription.next_batches()
            except TimeoutError:
                break
            messages = [message for batch in batches for message in batch.messages()]
            if count is not None:
                messages = messages[: count - printed]
            # One write for everything that has arrived: the reader of the pipe never waits for more.
            await output.write(messages)
            printed += len(messages)
    return printed
