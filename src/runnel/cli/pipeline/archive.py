"""`runnel pipeline archive`: topics into a Delta table; and looking after the table."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import typer

from runnel.cli.connecting import DEFAULT_URL, Url
from runnel.cli.pipeline.flags import (
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
from runnel.cli.pipeline.showing import ProgressLine, text_of
from runnel.cli.tables import Table, counted, human_bytes
from runnel.cli.times import NS_PER_SECOND, format_time
from runnel.errors import ClientFault

if TYPE_CHECKING:
    from runnel.spark.pipelines.archive.status import ArchiveStatus, QueryStatus

_NS_PER_HOUR: Final = 3600 * NS_PER_SECOND
_NS_PER_MS: Final = 10**6


def archive(
    *,
    to: Annotated[str, typer.Option(metavar="TABLE", help="The table's directory.")],
    topics: Topics = None,
    pattern: TopicPattern = None,
    once: Once = False,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="How often files are added when it goes on.")
    ] = "10s",
    name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Tells apart several archives that fill one table."),
    ] = "main",
    starting: Starting = "earliest",
    checkpoint: Checkpoint = None,
    rows_max: Annotated[
        int | None, typer.Option(metavar="ROWS", help="Messages in one micro-batch, at most.")
    ] = None,
    fail_on_data_loss: Annotated[
        bool, typer.Option(help="End with an error where messages are gone before they were read.")
    ] = True,
    compact: Annotated[
        bool,
        typer.Option("--compact", help="Join small files: alone, or at the end with --once."),
    ] = False,
    compact_every: Annotated[
        str | None, typer.Option(metavar="TIME", help="Join small files so often, as 1h.")
    ] = None,
    vacuum_older: Annotated[
        str,
        typer.Option(
            metavar="AGE", help="Compacting removes files that were replaced so long ago."
        ),
    ] = "7d",
    status: Annotated[
        bool, typer.Option("--status", help="Show what the table has, and how far archives are.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The status as JSON.")] = False,
    master: Master = DEFAULT_MASTER,
    conf: Conf = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Archive topics into a Delta table of Parquet files, by topic and date, each message once.

    Run again, it goes on where it was. Ctrl-C ends it; what it has not added yet, it adds the next time.
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
        from runnel.spark.pipelines.archive.running import Plan
        from runnel.spark.pipelines.archive.running import archive as run

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
    Plan.make(to, **what)  # what is wrong with it is told before Spark is started, which takes long
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
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
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
