"""The methods Fetch, ListShards and FetchShard: messages from an offset or a time, and whole shards for pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from runnel.broker.broker import FetchResult, ShardId
from runnel.broker.fetcher import FetchRequest
from runnel.broker.shard_fetcher import ShardFetchRequest
from runnel.formats.batch import Batch
from runnel.protocols.grpc.encoding.messages import (
    block_of,
    blocks_in,
    is_blocks,
    natural,
    proto_gaps,
    proto_message,
)
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.server.calls import GrpcCall
from runnel.protocols.grpc.server.grpc_server import shutting_down

_BYTES: Final = 2**20
_NS_PER_MS: Final = 1_000_000
# The messages of an answer, if not in blocks: clients accept 4 MiB by default.
_ANSWER_BYTES_MAX: Final = 3 * 2**20


async def fetch(call: GrpcCall, request: pb.FetchRequest) -> pb.FetchResponse:
    as_blocks = is_blocks(request.format)
    if request.wait_ms or call.access.is_slowed_out:
        call.when_closing(lambda: call.finish_with(shutting_down()))
    wanted = FetchRequest(
        request.topic,
        request.partition if request.HasField("partition") else None,
        offset=natural("offset", request.offset) if request.HasField("offset") else None,
        time_ns=request.time_ns if request.HasField("time_ns") else None,
        messages_max=natural("messages_max", request.messages_max),
        bytes_max=natural("bytes_max", request.bytes_max) or _BYTES,
        wait_ns=natural("wait_ms", request.wait_ms) * _NS_PER_MS,
    )
    fetched = await call.access.fetch(wanted)
    messages: list[pb.Message] = []
    next_offset = fetched.next_offset
    if not as_blocks:
        messages, next_offset = _fitting(fetched)
    return pb.FetchResponse(
        messages=messages,
        blocks=_blocks_of(fetched.batches) if as_blocks else (),
        next_offset=next_offset,
        first_offset=fetched.first_offset,
        end_offset=fetched.end_offset,
        gaps=proto_gaps(fetched.gaps),
    )


def _fitting(fetched: FetchResult) -> tuple[list[pb.Message], int]:
    """The messages that fit into an answer, at least one, and where the next fetch begins."""
    messages: list[pb.Message] = []
    size = 0
    for batch in fetched.batches:
        for message in batch.messages():
            sent = proto_message(message)
            size += sent.ByteSize()
            if size > _ANSWER_BYTES_MAX and messages:
                return messages, message.offset
            messages.append(sent)
    return messages, fetched.next_offset


def _blocks_of(batches: Sequence[Batch]) -> list[bytes]:
    return [block_of(batch) for batch in batches]


async def list_shards(call: GrpcCall, request: pb.ListShardsRequest) -> pb.ListShardsResponse:
    shards = await call.access.shards(
        tuple(request.patterns), request.time_ns if request.HasField("time_ns") else None
    )
    listed = [
        pb.Shard(
            journal=shard.journal,
            shard=shard.shard,
            epoch=shard.epoch,
            first_entry=shard.first_entry,
            next_entry=shard.next_entry,
            time_entry=shard.time_entry,
            address=shard.address,
        )
        for shard in shards
    ]
    return pb.ListShardsResponse(shards=listed)


async def fetch_shard(call: GrpcCall, request: pb.FetchShardRequest) -> pb.FetchShardResponse:
    wanted = ShardFetchRequest(
        ShardId(request.journal, request.shard),
        natural("entry", request.entry),
        end_entry=natural("end_entry", request.end_entry),
        patterns=tuple(request.patterns) or ("*",),
        epoch=natural("epoch", request.epoch),
        bytes_max=natural("bytes_max", request.bytes_max) or _BYTES,
    )
    fetched = await call.access.fetch_shard(wanted)
    return pb.FetchShardResponse(
        blocks=blocks_in(b"".join(fetched.blocks)),
        messages=fetched.messages,
        epoch=fetched.epoch,
        next_entry=fetched.next_entry,
        first_entry=fetched.first_entry,
        end_entry=fetched.end_entry,
        gaps=proto_gaps(fetched.gaps),
    )
