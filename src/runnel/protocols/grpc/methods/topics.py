"""The methods of topics and cursors, and of the broker's statistics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

import msgspec

from runnel.broker.pages import PAGE_MAX
from runnel.formats import wire
from runnel.protocols.grpc.encoding.messages import natural
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from runnel.protocols.grpc.server.calls import GrpcCall

_PLACE_NUMBERS: Final = ("offset", "epoch", "entry", "row")

_json = msgspec.json.Encoder()


# --- Topics ---


async def list_topics(call: GrpcCall, request: pb.ListTopicsRequest) -> pb.ListTopicsResponse:
    topics, is_complete = await call.access.topics(
        request.pattern or "*",
        after=request.after,
        limit=request.limit or PAGE_MAX,
    )
    return pb.ListTopicsResponse(topics=map(_proto_topic, topics), is_complete=is_complete)


async def describe_topic(
    call: GrpcCall, request: pb.DescribeTopicRequest
) -> pb.DescribeTopicResponse:
    topic = await call.access.describe_topic(request.name)
    return pb.DescribeTopicResponse(topic=_proto_topic(topic))


async def delete_topic(call: GrpcCall, request: pb.DeleteTopicRequest) -> pb.DeleteTopicResponse:
    await call.complete(call.access.delete_topic(request.name))
    return pb.DeleteTopicResponse()


async def purge_topic(call: GrpcCall, request: pb.PurgeTopicRequest) -> pb.PurgeTopicResponse:
    await call.complete(call.access.purge_topic(request.name))
    return pb.PurgeTopicResponse()


async def list_routes(call: GrpcCall, request: pb.ListRoutesRequest) -> pb.ListRoutesResponse:
    routes = [
        pb.Route(
            topic=route.topic,
            keep=route.keep,
            owners=map(_proto_owner, route.owners),
            exists=route.exists,
        )
        for route in call.access.routes(request.topics)
    ]
    return pb.ListRoutesResponse(routes=routes)


def _proto_topic(topic: wire.TopicState) -> pb.Topic:
    partitions = [
        pb.Partition(
            first_offset=partition.first_offset,
            next_offset=partition.next_offset,
            owner=_proto_owner(partition.owner),
        )
        for partition in topic.partitions
    ]
    return pb.Topic(
        name=topic.name,
        keep=topic.keep,
        journal=topic.journal,
        partition_count=topic.partition_count,
        messages=topic.messages,
        subscribers=topic.subscribers,
        rule=topic.rule,
        last_value=topic.last_value,
        retain=topic.retain,
        partitions=partitions,
    )


def _proto_owner(owner: wire.Owner) -> pb.Owner:
    return pb.Owner(
        journal=owner.journal, shard=owner.shard, epoch=owner.epoch, address=owner.address
    )


# --- Cursors ---


async def set_cursor(call: GrpcCall, request: pb.SetCursorRequest) -> pb.SetCursorResponse:
    places = [_place_of(place) for place in request.places]
    await call.complete(call.access.set_cursor(request.name, places))
    return pb.SetCursorResponse()


async def list_cursors(call: GrpcCall, request: pb.ListCursorsRequest) -> pb.ListCursorsResponse:
    if request.name:
        one = await call.access.cursor(request.name)
        return pb.ListCursorsResponse(cursors=map(_proto_cursor, one))
    cursors, is_complete = await call.access.cursors(after=request.after, limit=request.limit)
    return pb.ListCursorsResponse(cursors=map(_proto_cursor, cursors), has_more=not is_complete)


def _proto_cursor(cursor: wire.CursorState) -> pb.Cursor:
    return pb.Cursor(
        name=cursor.name,
        places=map(_proto_place, cursor.places),
        updated_ns=cursor.updated_ns,
    )


async def remove_cursor(call: GrpcCall, request: pb.RemoveCursorRequest) -> pb.RemoveCursorResponse:
    await call.complete(call.access.remove_cursor(request.name))
    return pb.RemoveCursorResponse()


def _place_of(place: pb.CursorPlace) -> wire.CursorPlace:
    for name in _PLACE_NUMBERS:
        natural(f"places.{name}", getattr(place, name))
    return wire.CursorPlace(
        topic=place.topic if place.HasField("topic") else None,
        partition=place.partition,
        offset=place.offset,
        journal=place.journal if place.HasField("journal") else None,
        shard=place.shard,
        epoch=place.epoch,
        entry=place.entry,
        row=place.row,
        patterns=tuple(place.patterns),
    )


def _proto_place(place: wire.CursorPlace) -> pb.CursorPlace:
    return pb.CursorPlace(
        topic=place.topic,
        partition=place.partition,
        offset=place.offset,
        journal=place.journal,
        shard=place.shard,
        epoch=place.epoch,
        entry=place.entry,
        row=place.row,
        patterns=place.patterns,
        lag=max(0, place.lag),
    )


# --- The broker ---


async def get_statistics(
    call: GrpcCall,
    request: pb.GetStatisticsRequest,  # noqa: ARG001 - it is empty
) -> pb.GetStatisticsResponse:
    document = await call.access.statistics_of_nodes()
    return pb.GetStatisticsResponse(json=_json.encode(document).decode())


async def ping(
    call: GrpcCall,
    request: pb.PingRequest,  # noqa: ARG001 - it is empty
) -> pb.PingResponse:
    settings = call.server.settings
    return pb.PingResponse(
        time_ns=call.server.broker.clock.time_ns(),
        cluster=settings.cluster.name,
        node=settings.cluster.node,
        server=_SERVER,
        message_bytes_max=settings.limits.message_bytes_max,
        batch_bytes_max=settings.limits.batch_bytes_max,
        tags_max=settings.limits.tags_max,
    )


_SERVER: Final = f"runnel/{version('runnel')}"
