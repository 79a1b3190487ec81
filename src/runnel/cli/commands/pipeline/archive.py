"""`runnel pipeline archive`: writes topics to a Delta table, compacts it, and shows its status."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from runnel.cli.commands.pipeline.options import (
    DEFAULT_MASTER,
    Checkpoint,
    Conf,
    Master,
    Once,
    Starting,
    TopicPattern,
    Topics,
    duration_ns,
    needs_spark,
    open_session,
    seconds,
)
from runnel.cli.commands.pipeline.progress_line import ProgressLine, text_of
from runnel.cli.connection import DEFAULT_URL, Url
from runnel.cli.render.tables import Table, counted, human_bytes, json_text
from runnel.cli.render.times import NS_PER_SECOND, format_time
from runnel.errors import ClientFault

if TYPE_CHECKING:
    from runnel.spark.pipelines.archive.status import ArchiveStatus, QueryStatus

_NS_PER_HOUR: Final = 3600 * NS_PER_SECOND
_NS_PER_MS: Final = 10**6


def archive(
    *,
    to: Annotated[str, typer.Option(metavar="TABLE", help="Directory of the table.")],
    topics: Topics = None,
    pattern: TopicPattern = None,
    once: Once = False,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="How often to add files, without --once.")
    ] = "10s",
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of this archive. Archives that fill the same table need different names.",
        ),
    ] = "main",
    starting: Starting = "earliest",
    checkpoint: Checkpoint = None,
    rows_max: Annotated[
        int | None,
        typer.Option(metavar="ROWS", help="Maximum number of messages in a micro-batch."),
    ] = None,
    fail_on_data_loss: Annotated[
        bool, typer.Option(help="Fail if messages were removed before they were read.")
    ] = True,
    compact: Annotated[
        bool,
        typer.Option("--compact", help="Join small files: on its own, or at the end of --once."),
    ] = False,
    compact_every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Join small files at this interval, such as 1h."),
    ] = None,
    vacuum_older: Annotated[
        str,
        typer.Option(
            metavar="AGE", help="When compacting, remove files that were replaced this long ago."
        ),
    ] = "7d",
    status: Annotated[
        bool,
        typer.Option("--status", help="Show what the table contains and how far its archives are."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
    master: Master = DEFAULT_MASTER,
    conf: Conf = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Archive topics into a Delta table of Parquet files, by topic and date, each message once.

    Run the command again to continue. Ctrl-C ends it; the next run adds the messages that are missing.
    """
    every_s = seconds("--every", every)
    compact_every_s = None if compact_every is None else seconds("--compact-every", compact_every)
    older_hours = -(-duration_ns("--vacuum-older", vacuum_older) // _NS_PER_HOUR)
    if as_json and not status:
        raise ClientFault("--json is the form of --status")
    if status:
        if topics or pattern or compact or once:
            raise ClientFault("--status shows, and does nothing else")
        _show_status(to, url=url, is_json=as_json)
        return
    if topics is None and pattern is None:
        if not compact:
            raise ClientFault("which topics? --topics a,b or --pattern 'sensors/*'")
        _compact(to, older_hours)
        return
    if topics is not None and pattern is not None:
        raise ClientFault("give --topics or --pattern, not both")
    if compact and not once:
        raise ClientFault("--compact is for --once, or alone; otherwise --compact-every 1h")
    with needs_spark():
        from runnel.spark.pipelines.archive.job import ArchivePlan
        from runnel.spark.pipelines.archive.job import archive as run

    what: dict[str, Any] = {
        "topics": None if topics is None else [one.strip() for one in topics.split(",")],
        "pattern": pattern,
        "url": url,
        "name": name,
        "checkpoint": checkpoint,
        "starting": starting,
        "rows_per_trigger_max": rows_max,
        "fails_on_data_loss": fail_on_data_loss,
    }
    ArchivePlan.make(to, **what)  # reports mistakes before Spark starts, which takes long
    session = open_session("archive", master, conf, broker=url)
    with ProgressLine("archived") as line:
        done = run(
            session,
            to,
            **what,
            every_s=None if once else every_s,
            compact_every_s=compact_every_s,
            vacuum_older_hours=older_hours,
            on_progress=line,
        )
    typer.echo(f"archived {text_of(done)}", err=True)
    if compact:
        _compact(to, older_hours)


def _compact(table: str, older_hours: int) -> None:
    with needs_spark():
        from runnel.spark.pipelines.archive.compaction import compact

    done = compact(table, vacuum_older_hours=older_hours)
    typer.echo(
        f"joined {counted(done.files_before, 'file')} into {done.files_after:,}, "
        f"removed {done.files_vacuumed:,} that were replaced earlier",
        err=True,
    )


# --- Status ---


def _show_status(table: str, *, url: str, is_json: bool) -> None:
    with needs_spark():
        from runnel.spark.pipelines.archive.status import archive_status

    found = archive_status(table, url=url)
    if is_json:
        typer.echo(json_text(found))
        return
    for line in _status_lines(found):
        typer.echo(line)
    if found.queries:
        Table(
            ("archive", "topics", "last batch", "messages behind", "cursor"),
            [_query_row(query) for query in found.queries],
            frozenset(("last batch", "messages behind")),
        ).show()
    for query in found.queries:
        if query.problem is not None:
            typer.echo(f"{query.name}: {query.problem}", err=True)


def _status_lines(found: ArchiveStatus) -> list[str]:
    age_s = max(0.0, time.time() - found.last_change_ms / 1000)
    dates = "none" if found.first_date is None else f"{found.first_date} to {found.last_date}"
    return [
        f"table    {found.table}, version {found.version}, layout {found.layout}",
        f"content  {counted(found.rows, 'message')} of {counted(found.topics, 'topic')}, "
        f"{counted(found.files, 'file')}, {human_bytes(found.bytes)}",
        f"dates    {dates}",
        f"changed  {format_time(found.last_change_ms * _NS_PER_MS)[:19]}Z, {age_s:,.0f} s ago",
    ]


def _query_row(query: QueryStatus) -> tuple[str, ...]:
    return (
        query.name,
        query.pattern if query.pattern is not None else ", ".join(query.topics),
        "" if query.last_batch is None else str(query.last_batch),
        "?" if query.messages_behind is None else f"{query.messages_behind:,}",
        query.cursor,
    )
