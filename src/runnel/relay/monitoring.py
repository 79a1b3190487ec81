"""Metrics and statistics of all nodes, for a caller that asks one of them.

Unlike other verbs, these leave out a node that does not answer, and say so: they have to work while a node is being
started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from runnel.broker.monitoring.exposed_metrics import NodeMetrics
from runnel.client.connection import Deadline
from runnel.cluster.state import Node
from runnel.errors import MalformedError, RunnelError
from runnel.formats import wire
from runnel.formats.metrics_report import ExposedMetric, decode_metrics
from runnel.platform.diagnostics import get_logger
from runnel.relay.relays import Relays

_T = TypeVar("_T")

# Of all nodes together, as they are asked at once. Prometheus gives up a scrape after 10 s.
NODE_SECONDS_MAX: Final = 5.0

logger = get_logger("runnel.relay")


async def metrics_of_nodes(
    relays: Relays, token: str | None, own: Callable[[], Awaitable[Sequence[ExposedMetric]]]
) -> Sequence[NodeMetrics]:
    """The metrics of each node. `own` reads those of this one."""

    async def ask(node: Node, deadline: Deadline) -> Sequence[ExposedMetric]:
        _, tail = await relays.peers.get(token, node.address).ask(
            wire.MetricsReport,
            wire.MetricsHead,
            deadline=deadline,
            what=f"asking {node.name} for metrics",
        )
        return decode_metrics(tail)

    found = await _of_nodes(relays, own, ask)
    return [NodeMetrics(name, metrics) for name, metrics in found.items()]


async def statistics_of_nodes(
    relays: Relays, token: str | None, own: Mapping[str, object]
) -> dict[str, object]:
    """This node's statistics, and those of all nodes under `nodes`."""

    async def ask(node: Node, deadline: Deadline) -> Mapping[str, object]:
        _, tail = await relays.peers.get(token, node.address).ask(
            wire.StatisticsReport,
            wire.Statistics,
            deadline=deadline,
            what=f"asking {node.name} for statistics",
        )
        return _document(tail)

    async def read_own() -> Mapping[str, object]:
        return own

    return {**own, "nodes": await _of_nodes(relays, read_own, ask)}


async def _of_nodes(
    relays: Relays,
    own: Callable[[], Awaitable[_T]],
    ask: Callable[[Node, Deadline], Awaitable[_T]],
) -> dict[str, _T | None]:
    """The answer of every node by name, in order. None: it did not answer in time, or does not live now."""
    deadline = Deadline(relays.timers, NODE_SECONDS_MAX)

    async def ask_once(node: Node) -> _T | None:
        try:
            return await ask(node, deadline)
        except RunnelError as error:
            logger.info("a node is left out of the figures", node=node.name, problem=str(error))
            return None

    this = relays.node.name
    others = [node for node in relays.node.nodes if node.name != this]
    asked = [relays.tasks.start_awaited(ask_once(node)) for node in others]
    try:
        found: dict[str, _T | None] = {this: await own()}
        answers = await asyncio.gather(*asked)
    finally:
        for task in asked:
            task.cancel()
    found |= zip((node.name for node in others), answers, strict=True)
    return {name: found.get(name) for name in sorted({*relays.node_names, this})}


def _document(tail: memoryview) -> Mapping[str, object]:
    try:
        return msgspec.json.decode(tail, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedError("statistics report", str(error)) from None
