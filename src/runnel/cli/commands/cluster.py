"""`runnel cluster`: shows the nodes of a broker and their shards, and changes who serves what."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from msgspec.structs import asdict

from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.options import AsJson
from runnel.cli.render.cluster_tables import node_table, shard_table
from runnel.cli.render.tables import json_text

app = typer.Typer(no_args_is_help=True, add_completion=False)

Node = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node, such as node-2.")]

# What `status` shows without --all. There may be 100,000 shards.
_SHOWN_MAX: Final = 40


@app.callback()
def _cluster() -> None:
    """Show the processes of a broker, and who serves which shard; move shards."""


@app.command()
def status(
    *,
    is_complete: Annotated[
        bool, typer.Option("--all", help="Show all shards, and nodes that are gone.")
    ] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Show the nodes with what they carry, and the shards with the nodes that serve them.

    Shards that move, or that no node serves, come first.
    """
    found = run_connected(url, lambda bus: bus.cluster())
    if as_json:
        document = {
            "version": found.version,
            "nodes": [asdict(node) for node in found.nodes],
            "shards": [asdict(shard) for shard in found.shards],
        }
        typer.echo(json_text(document))
        return
    node_table([node for node in found.nodes if node.is_alive or is_complete]).show()
    typer.echo()
    shards = sorted(found.shards, key=lambda each: bool(each.node) and not each.wanted)
    shown = shards if is_complete else shards[:_SHOWN_MAX]
    shard_table(shown).show()
    if len(shown) < len(shards):
        typer.echo(f"… and {len(shards) - len(shown):,} more: --all shows them")


@app.command()
def move(
    shard: Annotated[
        str, typer.Argument(metavar="SHARD", help="Journal and number of the shard, as main/3.")
    ],
    node: Node,
    *,
    url: Url = DEFAULT_URL,
) -> None:
    """Let a node serve a shard. It moves at once, and its clients follow; no message is lost or repeated.

    If it cannot move within ten seconds, the wish is dropped.
    """
    run_connected(url, lambda bus: bus.move_shard(shard, node))


@app.command()
def drain(
    node: Node,
    *,
    is_undone: Annotated[
        bool, typer.Option("--undo", help="Let it take shards again instead.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Let a node give up its shards, one after the other, and take none. Its process goes on."""
    run_connected(url, lambda bus: bus.drain_node(node, is_draining=not is_undone))


@app.command()
def balance(*, as_json: AsJson = False, url: Url = DEFAULT_URL) -> None:
    """Make one round of the moves that even out the loads, now.

    The broker does so by itself, unless cluster.balance is off.
    """
    wishes = run_connected(url, lambda bus: bus.balance_cluster())
    if as_json:
        typer.echo(json_text([asdict(wish) for wish in wishes]))
    elif not wishes:
        typer.echo("nothing would be better")
    else:
        for wish in wishes:
            typer.echo(f"{wish.journal}/{wish.shard} to {wish.node}: {wish.reason}")
