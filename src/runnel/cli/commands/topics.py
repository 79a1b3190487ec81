"""`runnel topics`: lists, shows, deletes and purges topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.options import AsJson, DefaultCommandGroup, Form, TableFormat, Yes, confirm
from runnel.cli.render.tables import Table, counted, json_text, printable
from runnel.formats.wire import TopicState
from runnel.topics.patterns import Pattern

app = typer.Typer(cls=DefaultCommandGroup, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the topic.")]


@app.callback()
def _topics() -> None:
    """List, show, delete and purge topics. Without a command: list."""


@app.command("list")
def list_topics(
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="List topics that match, such as 'sensors/*'.")
    ] = "*",
    *,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also print journal, rule and retention.")
    ] = False,
    form: Form = TableFormat.TABLE,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List topics by name.

    `messages` counts all messages that have an offset; retention may have removed some of them. System topics are
    listed only for patterns that begin with !.
    """
    Pattern(pattern)  # its error says where the pattern is wrong
    found = run_connected(url, lambda bus: bus.topics(pattern))
    if as_json or form is TableFormat.JSON:
        typer.echo(json_text([_document(topic) for topic in found]))
    elif found:
        topic_table(found, is_long=long).show()
    else:
        typer.echo(f"no topic matches {printable(pattern)}", err=True)


@app.command()
def show(
    name: Name,
    *,
    form: Form = TableFormat.TABLE,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show one topic: its policy, its partitions and their offsets."""
    topic = run_connected(url, lambda bus: bus.topic(name))
    if as_json or form is TableFormat.JSON:
        typer.echo(json_text(_document(topic)))
        return
    for line in topic_lines(topic):
        typer.echo(line)
    typer.echo()
    partition_table(topic).show()


@app.command()
def delete(name: Name, *, yes: Yes = False, url: Url = DEFAULT_URL) -> None:
    """Delete a topic and all of its messages.

    A topic that is created again under this name continues after the last offset.
    """
    if not yes:
        confirm(f"Delete the topic {printable(name)} and all of its messages?")
    run_connected(url, lambda bus: bus.delete_topic(name))
    typer.echo(f"deleted {printable(name)}", err=True)


@app.command()
def purge(name: Name, *, yes: Yes = False, url: Url = DEFAULT_URL) -> None:
    """Remove all messages of a topic. The topic stays, and its offsets continue."""
    if not yes:
        confirm(f"Remove all messages of the topic {printable(name)}?")
    run_connected(url, lambda bus: bus.purge_topic(name))
    typer.echo(f"purged {printable(name)}", err=True)


# --- Tables ---


def topic_table(topics: Sequence[TopicState], *, is_long: bool) -> Table:
    columns = ("topic", "keep", "partitions", "messages", "subscribers")
    rows = [
        (
            topic.name,
            topic.keep,
            str(topic.partition_count),
            f"{topic.messages:,}",
            f"{topic.subscribers:,}",
        )
        for topic in topics
    ]
    numbers = frozenset(("partitions", "messages", "subscribers"))
    if not is_long:
        return Table(columns, rows, numbers)
    more = ("journal", "rule", "retain", "last value")
    return Table(
        (*columns, *more),
        [
            (*row, topic.journal, topic.rule or "-", topic.retain or "-", _yes(topic.last_value))
            for row, topic in zip(rows, topics, strict=True)
        ],
        numbers,
    )


def topic_lines(topic: TopicState) -> list[str]:
    """The facts that hold for all partitions."""
    rule = "none: the default" if topic.rule is None else topic.rule
    facts = {
        "topic": topic.name,
        "keep": topic.keep,
        "journal": topic.journal,
        "rule": rule,
        "retain": topic.retain or "for ever",
        "last value": _yes(topic.last_value),
        "messages": f"{topic.messages:,} so far",
        "subscribers": f"{topic.subscribers:,}",
        "partitions": counted(topic.partition_count, "partition"),
    }
    return [f"{name + ':':<12} {printable(value)}" for name, value in facts.items()]


def partition_table(topic: TopicState) -> Table:
    return Table(
        ("partition", "first", "next", "kept", "shard", "epoch", "owner"),
        [
            (
                str(number),
                str(partition.first_offset),
                str(partition.next_offset),
                f"{partition.next_offset - partition.first_offset:,}",
                f"{partition.owner.journal}/{partition.owner.shard}",
                str(partition.owner.epoch),
                partition.owner.address or "this node",
            )
            for number, partition in enumerate(topic.partitions)
        ],
        frozenset(("partition", "first", "next", "kept", "epoch")),
    )


def _yes(value: bool) -> str:  # noqa: FBT001 - it is the value to be written
    return "yes" if value else "no"


# --- JSON ---


def _document(topic: TopicState) -> dict[str, Any]:
    """The topic as JSON objects; on the wire it is arrays."""
    partitions = [
        {
            "partition": number,
            "first_offset": partition.first_offset,
            "next_offset": partition.next_offset,
            "owner": msgspec.structs.asdict(partition.owner),
        }
        for number, partition in enumerate(topic.partitions)
    ]
    document = msgspec.structs.asdict(topic)
    document.pop("partitions")
    return {**document, "partitions": partitions} if partitions else document
