"""`runnel subscriptions`: lists, shows, creates, pauses, moves and deletes subscriptions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.options import AsJson, DefaultCommandGroup, Form, TableFormat, Yes, confirm
from runnel.cli.places import STARTS, Place, Time, parse_place, parse_start
from runnel.cli.render.subscription_tables import (
    document,
    member_table,
    partition_table,
    subscription_lines,
    subscription_table,
)
from runnel.cli.render.tables import json_text, printable
from runnel.config.units import DURATION_HINT, parse_duration
from runnel.errors import ClientFault
from runnel.group_rules.definition import Mode
from runnel.topics.patterns import Pattern

if TYPE_CHECKING:
    from runnel.client import Bus

app = typer.Typer(cls=DefaultCommandGroup, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the subscription.")]


@app.callback()
def _subscriptions() -> None:
    """List, show, make, pause, move and delete subscriptions. Without a command: list."""


@app.command("list")
def list_subscriptions(
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="List names that match, such as 'bill*'.")
    ] = "*",
    *,
    form: Form = TableFormat.TABLE,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List subscriptions by name.

    `backlog` is the number of messages that are not acknowledged. Of these, `in flight` are leased to consumers and
    `delayed` wait for another attempt. `oldest` is the age of the oldest. `redelivered` counts since the broker
    started.
    """
    wanted = Pattern(pattern)
    found = [
        state
        for state in run_connected(url, lambda bus: bus.subscriptions())
        if wanted.matches(state.name)
    ]
    if as_json or form is TableFormat.JSON:
        typer.echo(json_text([document(state) for state in found]))
    elif found:
        subscription_table(found, time.time_ns()).show()
    elif pattern == "*":
        typer.echo("there are no subscriptions", err=True)
    else:
        typer.echo(f"no subscription matches {printable(pattern)}", err=True)


@app.command()
def show(
    name: Name,
    *,
    form: Form = TableFormat.TABLE,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show one subscription: its options, its members, and its progress in each partition."""
    state = run_connected(url, lambda bus: bus.subscription(name))
    if as_json or form is TableFormat.JSON:
        typer.echo(json_text(document(state)))
        return
    now_ns = time.time_ns()
    for line in subscription_lines(state, now_ns):
        typer.echo(line)
    tables = [partition_table(state)]
    if state.mode == Mode.MULTICAST:
        tables.insert(0, member_table(state, now_ns))
    for table in tables:
        if table.rows:
            typer.echo()
            table.show()


@app.command()
def make(
    name: Name,
    pattern: Annotated[
        list[str],
        typer.Argument(metavar="PATTERN", help="Topics of the subscription, such as 'orders/*'."),
    ],
    *,
    mode: Annotated[
        Mode, typer.Option(help="Which consumers get a message, as in `runnel consume`.")
    ] = Mode.SHARED,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE", help="Where the subscription begins, as in `runnel consume`."
        ),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long a consumer may hold a message without renewing its lease.",
        ),
    ] = None,
    processing_max: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="How long a consumer may renew the lease of a message in total."
        ),
    ] = None,
    deliveries_max: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Deliveries before a message becomes a dead letter. 0: no limit.",
        ),
    ] = None,
    retry_delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Delay before the second attempt.")
    ] = None,
    retry_delay_max: Annotated[
        str | None, typer.Option(metavar="TIME", help="Longest delay before any further attempt.")
    ] = None,
    backoff: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            min=1,
            help="Factor by which each delay is longer than the one before.",
        ),
    ] = None,
    absent_max: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long a member of a multicast may be absent before it is removed.",
        ),
    ] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Create a subscription. It keeps every message that comes from then on until a consumer acknowledges it.

    If the subscription exists, its mode and topics must be the same; the given options then replace its own. TIME
    is a duration such as 500ms, 30s or 1h30m.
    """
    for text in pattern:
        Pattern(text)  # its error says where the pattern is wrong
    begin = (
        None if start is None else parse_start("--start", start, pattern, time.time_ns(), STARTS)
    )
    lease_s = _seconds("--lease", lease)
    processing_max_s = _seconds("--processing-max", processing_max)
    retry_delay_s = _seconds("--retry-delay", retry_delay)
    retry_delay_max_s = _seconds("--retry-delay-max", retry_delay_max)
    absent_max_s = _seconds("--absent-max", absent_max)
    run_connected(
        url,
        lambda bus: bus.make_subscription(
            name,
            *pattern,
            mode=mode,
            start=begin,
            lease_s=lease_s,
            processing_max_s=processing_max_s,
            deliveries_max=deliveries_max,
            retry_delay_s=retry_delay_s,
            retry_delay_max_s=retry_delay_max_s,
            backoff=backoff,
            absent_max_s=absent_max_s,
        ),
    )
    typer.echo(f"made {printable(name)}", err=True)


def _seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return parse_duration(text) / 1e9
    except ValueError:
        raise ClientFault(f"{option}: {text!r} is not a duration; {DURATION_HINT}") from None


@app.command()
def delete(name: Name, *, yes: Yes = False, url: Url = DEFAULT_URL) -> None:
    """Delete a subscription: its backlog is forgotten, and its consumers end. Its dead letters stay."""
    if not yes:
        confirm(f"Delete the subscription {printable(name)} and forget what it is owed?")
    run_connected(url, lambda bus: bus.delete_subscription(name))
    typer.echo(f"deleted {printable(name)}", err=True)


@app.command()
def pause(name: Name, *, url: Url = DEFAULT_URL) -> None:
    """Deliver no further messages for now. Consumers may finish the messages that they have."""
    run_connected(url, lambda bus: bus.pause_subscription(name))
    typer.echo(f"paused {printable(name)}", err=True)


@app.command()
def resume(name: Name, *, url: Url = DEFAULT_URL) -> None:
    """Continue delivering after a pause."""
    run_connected(url, lambda bus: bus.resume_subscription(name))
    typer.echo(f"resumed {printable(name)}", err=True)


@app.command("remove-member")
def remove_member(
    name: Name,
    member: Annotated[str, typer.Argument(metavar="MEMBER", help="Name of the member.")],
    *,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Remove a member of a multicast and forget its backlog."""
    if not yes:
        confirm(
            f"Remove the member {printable(member)} of {printable(name)} and forget what it is owed?"
        )
    run_connected(url, lambda bus: bus.remove_member(name, member))
    typer.echo(f"removed {printable(member)} of {printable(name)}", err=True)


# --- Moving ---


@app.command()
def move(
    name: Name,
    *,
    to: Annotated[
        str,
        typer.Option("--to", metavar="PLACE", help="New place of the subscription (see above)."),
    ],
    topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Move only in this topic.")
    ] = None,
    partition: Annotated[
        int | None, typer.Option(metavar="P", min=0, help="Move only in this partition.")
    ] = None,
    member: Annotated[
        str | None, typer.Option(metavar="NAME", help="Move only this member of a multicast.")
    ] = None,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Move a subscription to another place.

    Messages before PLACE become acknowledged. Messages from PLACE on are delivered, possibly again. Messages that
    consumers hold are taken back and do not count as failed.

    PLACE is earliest, latest, an offset (with --topic), or a time: 2026-05-01T12:30:00Z, a date, or an age such as
    2h.
    """
    place = parse_place("--to", to, time.time_ns(), STARTS)
    if topic is None and isinstance(place, int):
        raise ClientFault(f"--to {place} is an offset: say of which topic, with --topic")
    if topic is None and partition is not None:
        raise ClientFault(f"--partition {partition}: say of which topic, with --topic")
    if not yes:
        confirm(
            f"Move the subscription {printable(name)} to {printable(to)}, and forget what it has "
            "acknowledged behind that, and what it is owed before?"
        )
    run_connected(url, lambda bus: _move(bus, name, place, topic, partition, member))
    typer.echo(f"moved {printable(name)}", err=True)


async def _move(
    bus: Bus, name: str, place: Place, topic: str | None, partition: int | None, member: str | None
) -> None:
    if topic is None:
        assert not isinstance(place, int)
        start = ("time", place.time_ns) if isinstance(place, Time) else place
        await bus.move_subscription(name, start, member=member)
    else:
        offsets = await _offsets(bus, place, topic, partition)
        await bus.move_subscription(name, offsets, member=member)


async def _offsets(
    bus: Bus, place: Place, topic: str, partition: int | None
) -> Mapping[str | tuple[str, int], int]:
    """Translate the place to an offset of each chosen partition."""
    bounds = (await bus.topic(topic)).partitions
    if partition is not None and partition >= len(bounds):
        raise ClientFault(f"{topic!r} has no partition {partition}: they end at {len(bounds) - 1}")
    if partition is None and isinstance(place, int) and len(bounds) > 1:
        raise ClientFault(f"{topic!r} has {len(bounds)} partitions: say which, with --partition")
    if isinstance(place, int):
        return {(topic, partition or 0): place}
    offsets: dict[str | tuple[str, int], int] = {}
    for number in range(len(bounds)) if partition is None else (partition,):
        if isinstance(place, Time):
            page = await bus.fetch(topic, partition=number, time=place.time_ns, messages_max=1)
            offset = page.messages[0].offset if page.messages else page.next_offset
        else:
            bound = bounds[number]
            offset = bound.next_offset if place == "latest" else bound.first_offset
        offsets[topic, number] = offset
    return offsets
