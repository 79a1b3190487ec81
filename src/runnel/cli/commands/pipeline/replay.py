"""`runnel pipeline replay`: publishes stored messages again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

import typer

from runnel.cli.commands.pipeline.options import (
    DEFAULT_MASTER,
    Checkpoint,
    Conf,
    Master,
    Topics,
    needs_spark,
    open_session,
    seconds,
)
from runnel.cli.commands.pipeline.progress_line import ProgressLine
from runnel.cli.connection import DEFAULT_URL, Url
from runnel.cli.options import parse_tags
from runnel.cli.render.tables import counted
from runnel.errors import ClientFault

if TYPE_CHECKING:
    from runnel.spark.pipelines.replay.progress import ReplayProgress

_OFFSETS: Final = re.compile(r"(.+):(\d+)=(\d*)\.\.(\d*)")
_OFFSET_MAX: Final = 2**63 - 1
_SECONDS_PER_DAY: Final = 86_400


def replay(
    *,
    archive: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Replay from this archive.")
    ] = None,
    path: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Replay from this data directory, or a copy of one."),
    ] = None,
    topics: Topics = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="Topics that match, such as 'sensors/*'. Default: all topics."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Replay messages received at this time or later: 2025-01-31T12:00:00Z.",
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Replay messages received before this time.")
    ] = None,
    offsets: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC:PARTITION=FIRST..LAST",
            help="Replay only these offsets of a partition. FIRST or LAST may be left out. Repeatable.",
        ),
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Replay only messages with this tag. Repeatable."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="Replay only messages that match a condition: \"key = 'a' AND size > 9\".",
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FROM=TO",
            help="Rename topics: 'sensors/*=replayed/sensors/*'. The first rule that matches applies. "
            "Repeatable.",
        ),
    ] = None,
    into_existing: Annotated[
        bool,
        typer.Option(
            "--into-existing",
            help="Allow topics that keep their names to exist already, and append to them.",
        ),
    ] = False,
    speed: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR", help="Pace by event times, FACTOR times as fast. 1: original speed."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="N", help="Maximum number of messages per second, in total."),
    ] = None,
    gap_max: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="With --speed: longest wait between two messages, such as 10s."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    tasks: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Number of tasks that send. Default: as many as run at once."
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL of the broker to publish to. Default: --url."),
    ] = None,
    master: Master = DEFAULT_MASTER,
    conf: Conf = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Publish stored messages again, in order, with their own times: from an archive, from files, or from the broker.

    With --checkpoint, a replay that was interrupted continues when the same command runs again, and publishes each
    message once. A replay that is complete does nothing. Without --speed and --rate, messages are sent as fast as
    possible.
    """
    with needs_spark():
        from runnel.spark.pipelines.replay.job import run_replay
        from runnel.spark.pipelines.replay.options import check_options

    options = check_options(
        archive=archive,
        path=path,
        url=url,
        into_url=into,
        topics=None if topics is None else [one.strip() for one in topics.split(",")],
        pattern=pattern,
        since=since,
        until=until,
        offsets=dict(map(_offsets, offsets or ())),
        tags=parse_tags("--tag", tag or ()),
        where=where,
        rename=rename or (),
        speed=speed,
        rate=rate,
        gap_max_s=None if gap_max is None else seconds("--gap-max", gap_max),
    )
    session = open_session("replay", master, conf, broker=into or url)
    with ProgressLine("replayed") as line:
        done = run_replay(
            session,
            options,
            into_existing=into_existing,
            tasks=tasks,
            checkpoint=checkpoint,
            on_progress=lambda progress: line.tell(text_of(progress)),
        )
    if done.sent:
        there = f", {done.already_there:,} were there already" if done.already_there else ""
        typer.echo(f"replayed {counted(done.sent, 'message')}{there}", err=True)
    else:
        typer.echo(f"nothing to do: all {counted(done.messages, 'message')} are there", err=True)


def text_of(progress: ReplayProgress) -> str:
    """`120,000 of 500,000 messages, 40,000/s, 2:05:00 left`."""
    parts = [
        f"{progress.messages:,} of {counted(progress.messages_total, 'message')}",
        f"{progress.messages_per_second:,.0f}/s",
    ]
    if progress.seconds_left is not None:
        parts.append(f"{_span(progress.seconds_left)} left")
    return ", ".join(parts)


def _span(seconds: float) -> str:
    days, rest = divmod(round(seconds), _SECONDS_PER_DAY)
    clock = f"{rest // 3600}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{counted(days, 'day')} {clock}" if days else clock


def _offsets(text: str) -> tuple[tuple[str, int], range]:
    found = _OFFSETS.fullmatch(text)
    first, last = (found[3], found[4]) if found else ("", "")
    chosen = range(int(first or 1), int(last) + 1 if last else _OFFSET_MAX + 1)
    if found is None or not (first or last) or not chosen:
        raise ClientFault(
            f"--offsets {text!r}: write TOPIC:PARTITION=FIRST..LAST, such as sensors/a:0=17..40, 17.. or ..40"
        )
    return (found[1], int(found[2])), chosen
