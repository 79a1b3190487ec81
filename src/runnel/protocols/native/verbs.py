"""Calls the broker's verb for each request that a single verb answers, and makes the reply.

Publishing and subscribing are in the session, which takes care of order and credit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final, NamedTuple, TypeAlias

import msgspec

from runnel.broker.access import Access
from runnel.broker.broker import ShardId
from runnel.broker.consumer_groups import SettleRequest, SubscriptionRequest
from runnel.broker.fetcher import FetchRequest
from runnel.broker.shard_fetcher import ShardFetchRequest
from runnel.errors import MovedError
from runnel.formats import block, wire
from runnel.formats import cluster_heads as cluster
from runnel.formats import envelope as envelopes
from runnel.formats import work_heads as work
from runnel.formats.batch import Batch
from runnel.formats.metrics_report import encode_metrics
from runnel.protocols.native.output import Buffer
from runnel.protocols.native.requests import check_count

WhileWaiting: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]

PromptRequest: TypeAlias = wire.Ping | wire.Routes | wire.Nodes | wire.Statistics
# Their answers may be large: the session prepares few of them at a time.
ListRequest: TypeAlias = (
    wire.Topics
    | wire.Shards
    | wire.Cursors
    | wire.MetricsHead
    | work.ListSubscriptions
    | work.DeadLettersHead
    | cluster.ClusterHead
)
FetchHead: TypeAlias = wire.Fetch | wire.FetchShard
SmallRequest: TypeAlias = (
    wire.DescribeTopic
    | wire.DeleteTopic
    | wire.PurgeTopic
    | wire.Producer
    | wire.SetCursor
    | wire.RemoveCursor
    | wire.MakeCheckpoint
    | work.MakeSubscription
    | work.DeleteSubscription
    | work.PauseSubscription
    | work.MoveSubscription
    | work.RemoveMember
    | work.SettleDead
    | cluster.MoveShard
    | cluster.DrainNode
    | cluster.BalanceCluster
)
_WorkRequest: TypeAlias = (
    work.ListSubscriptions
    | work.DeadLettersHead
    | work.SettleDead
    | work.MakeSubscription
    | work.DeleteSubscription
    | work.PauseSubscription
    | work.MoveSubscription
    | work.RemoveMember
)
WaitingRequest: TypeAlias = FetchHead | ListRequest | SmallRequest

_NS_PER_MS: Final = 1_000_000

_json = msgspec.json.Encoder()


class Reply(NamedTuple):
    """The head of an answer, its tail, and the number of messages in the tail."""

    head: wire.Head
    tail: Sequence[Buffer] = ()
    messages: int = 0


def reply_to(access: Access, request: PromptRequest) -> Reply:
    """The answer to a request that waits for nothing."""
    match request:
        case wire.Ping():
            return Reply(wire.Pong(request.id, access.time_ns()))
        case wire.Routes():
            return Reply(wire.RouteList(request.id, access.routes(request.topics)))
        case wire.Nodes():
            nodes = access.nodes
            return Reply(wire.NodeList(request.id, nodes.version, nodes.nodes))
        case wire.Statistics():
            document = _json.encode(access.statistics())
            return Reply(wire.StatisticsReport(request.id), (document,))


async def wait_reply_as_of(
    access: Access,
    as_of: int | None,
    request: WaitingRequest,
    while_waiting: WhileWaiting = nullcontext,
) -> Reply:
    """The answer to a request of another node, if this one serves what the asker believes: before, and still after."""
    if as_of is not None:
        _check_served(access, as_of)
    reply = await wait_reply_to(access, request, while_waiting)
    if as_of is not None:
        _check_served(access, as_of)
    return reply


def _check_served(access: Access, as_of: int) -> None:
    if access.served_stamp() != as_of:
        raise MovedError("this node serves other shards than the asking node believes; ask again")


async def wait_reply_to(
    access: Access, request: WaitingRequest, while_waiting: WhileWaiting = nullcontext
) -> Reply:
    """The answer to a request that may wait: for a device, or (within `while_waiting`) for a message."""
    match request:
        case wire.Fetch():
            return await _wait_fetched(access, request, while_waiting)
        case wire.Shards():
            shards = await access.shards(request.patterns, request.time_ns)
            return Reply(wire.ShardList(request.id, shards))
        case wire.FetchShard():
            return await _wait_shard_fetched(access, request)
        case wire.Topics():
            topics, is_complete = await access.topics(
                request.pattern, after=request.after, limit=request.limit
            )
            return Reply(wire.TopicList(request.id, topics, is_complete))
        case wire.Cursors():
            if request.name is not None:
                return Reply(wire.CursorListHead(request.id, await access.cursor(request.name)))
            listed = await access.cursors(after=request.after, limit=request.limit)
            return Reply(wire.CursorListHead(request.id, *listed))
        case wire.MetricsHead():
            tail = encode_metrics(await access.metrics())
            return Reply(wire.MetricsReport(request.id), (tail,))
        case wire.Producer():
            return Reply(wire.Term(request.id, await access.new_term(request.name)))
        case wire.DescribeTopic():
            topic = await access.describe_topic(request.name)
            return Reply(wire.TopicList(request.id, (topic,), is_complete=True))
        case wire.MakeCheckpoint():
            return Reply(wire.Checkpoint(request.id, *await access.checkpoint()))
        case wire.DeleteTopic():
            await access.delete_topic(request.name)
        case wire.PurgeTopic():
            await access.purge_topic(request.name)
        case wire.SetCursor():
            await access.set_cursor(request.name, request.places)
        case wire.RemoveCursor():
            await access.remove_cursor(request.name)
        case (
            cluster.ClusterHead()
            | cluster.MoveShard()
            | cluster.DrainNode()
            | cluster.BalanceCluster()
        ):
            return await _wait_cluster_reply(access, request)
        case _:
            return await _wait_work_reply(access, request)
    return Reply(wire.Done(request.id))


async def _wait_cluster_reply(access: Access, request: cluster.ClusterRequest) -> Reply:
    """The answer to a request about nodes and the owners of shards."""
    match request:
        case cluster.ClusterHead():
            after = None if request.after is None else _shard_of(request.after)
            report = await access.cluster(after=after, limit=request.limit)
            return Reply(cluster.ClusterReport(request.id, *report))
        case cluster.BalanceCluster():
            return Reply(cluster.ClusterWishes(request.id, await access.balance_cluster()))
        case cluster.MoveShard():
            await access.move_shard(ShardId(request.journal, request.shard), request.node)
        case cluster.DrainNode():
            await access.drain_node(request.node, is_draining=request.is_draining)
    return Reply(wire.Done(request.id))


def _shard_of(name: cluster.ShardName) -> ShardId:
    return ShardId(name.journal, name.shard)


async def _wait_work_reply(access: Access, request: _WorkRequest) -> Reply:
    """The answer to a request about subscriptions or their dead letters."""
    match request:
        case work.ListSubscriptions():
            if request.name is not None:
                one = await access.subscription(request.name)
                return Reply(work.SubscriptionListHead(request.id, (one,)))
            listed = await access.subscriptions(after=request.after, limit=request.limit)
            return Reply(work.SubscriptionListHead(request.id, *listed))
        case work.DeadLettersHead():
            batches, next_offset = await access.dead_letters(
                request.subscription, request.offset, request.messages_max
            )
            blocks = [part for batch in batches for part in _block_of(batch)]
            return Reply(work.DeadList(request.id, next_offset), blocks, sum(map(len, batches)))
        case work.SettleDead():
            check_count(request, len(request.offsets))
            wanted = SettleRequest(
                request.subscription, request.offsets, request.is_all, request.is_redriven
            )
            settled = await access.settle_dead(wanted)
            return Reply(work.SettledHead(request.id, settled))
        case work.MakeSubscription():
            await access.make_subscription(
                SubscriptionRequest(
                    request.name, request.patterns, request.mode, request.start, request.options
                )
            )
        case work.DeleteSubscription():
            await access.delete_subscription(request.name)
        case work.PauseSubscription():
            await access.pause_subscription(request.name, is_paused=request.is_paused)
        case work.MoveSubscription():
            await access.move_subscription(request.name, request.start, member=request.member)
        case work.RemoveMember():
            await access.remove_member(request.name, request.member)
    return Reply(wire.Done(request.id))


async def _wait_fetched(access: Access, request: wire.Fetch, while_waiting: WhileWaiting) -> Reply:
    fetched = await access.fetch(
        FetchRequest(
            request.topic,
            request.partition,
            request.offset,
            request.time_ns,
            request.messages_max,
            request.bytes_max,
            request.wait_ms * _NS_PER_MS,
            while_waiting,
        )
    )
    head = wire.Fetched(
        request.id,
        fetched.next_offset,
        fetched.first_offset,
        fetched.end_offset,
        fetched.gaps,
    )
    blocks = [part for batch in fetched.batches for part in _block_of(batch)]
    return Reply(head, blocks, sum(map(len, fetched.batches)))


async def _wait_shard_fetched(access: Access, request: wire.FetchShard) -> Reply:
    fetched = await access.fetch_shard(
        ShardFetchRequest(
            ShardId(request.journal, request.shard),
            request.entry,
            request.end_entry,
            request.patterns,
            request.epoch,
            request.bytes_max,
        )
    )
    head = wire.ShardFetched(
        request.id,
        fetched.epoch,
        fetched.next_entry,
        fetched.first_entry,
        fetched.end_entry,
        fetched.gaps,
    )
    return Reply(head, fetched.blocks, fetched.messages)


def _block_of(batch: Batch) -> tuple[Buffer, ...]:
    """The parts of the batch's block; the body is not copied."""
    return block.pack(envelopes.encode(batch.envelope), batch.body)
