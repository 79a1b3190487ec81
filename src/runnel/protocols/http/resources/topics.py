"""The resources of topics and their policies: list, describe, purge and delete topics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, delete, get
from litestar.params import FromPath, QueryParameter

from runnel.config import Keep
from runnel.formats.wire import PartitionState, TopicState
from runnel.protocols.http.server.calls import call_of
from runnel.topics.names import check_topic
from runnel.topics.policies import FixedPolicy

_LIMIT_MAX: Final = 10_000


class TopicPartition(msgspec.Struct, frozen=True):
    """One partition: the messages from `first_offset` to before `next_offset`, and the shard they lie in."""

    partition: int
    first_offset: int
    next_offset: int
    journal: str
    shard: int
    epoch: int


class TopicOut(msgspec.Struct, frozen=True):
    """A topic, and the policy it has."""

    name: str
    keep: Keep
    journal: str
    partition_count: int
    messages: Annotated[
        int,
        msgspec.Meta(
            description="Messages that have been given an offset so far; some may have been removed."
        ),
    ]
    subscribers: int
    rule: Annotated[
        str | None,
        msgspec.Meta(description="Pattern of the rule that it follows; null: the default."),
    ]
    last_value: bool
    retain: Annotated[str, msgspec.Meta(description="In words; empty: for ever.")]


class TopicDetail(TopicOut, frozen=True):
    """A topic with its partitions."""

    partitions: Sequence[TopicPartition]


class TopicPage(msgspec.Struct, frozen=True):
    """Topics in order of their names. If `is_complete` is false, ask again with `after` the last name."""

    topics: Sequence[TopicOut]
    is_complete: bool


@get("/v1/topics", operation_id="listTopics", tags=["topics"])
async def list_topics(
    request: Request[Any, Any, Any],
    pattern: Annotated[
        str,
        QueryParameter(description="A glob; topics that begin with ! match only patterns that do."),
    ] = "*",
    after: Annotated[str, QueryParameter(description="Only names after this one.")] = "",
    limit: Annotated[
        int,
        QueryParameter(
            ge=1,
            le=_LIMIT_MAX,
            description="Maximum number of topics per page; a page has 1,000 or fewer.",
        ),
    ] = 1000,
) -> TopicPage:
    """List the topics that you have any right to."""
    topics, is_complete = await call_of(request).access.topics(pattern, after=after, limit=limit)
    return TopicPage([_topic(topic) for topic in topics], is_complete)


@get("/v1/topics/{topic:str}", operation_id="describeTopic", tags=["topics"])
async def describe_topic(request: Request[Any, Any, Any], topic: FromPath[str]) -> TopicDetail:
    """Describe a topic with its partitions."""
    found = await call_of(request).access.describe_topic(topic)
    partitions = [_partition(number, each) for number, each in enumerate(found.partitions)]
    return TopicDetail(**msgspec.structs.asdict(_topic(found)), partitions=partitions)


@delete("/v1/topics/{topic:str}", operation_id="deleteTopic", tags=["topics"])
async def delete_topic(request: Request[Any, Any, Any], topic: FromPath[str]) -> None:
    """Delete a topic and its messages. Made again, it goes on after its last offset."""
    await call_of(request).access.delete_topic(topic)


@delete("/v1/topics/{topic:str}/messages", operation_id="purgeTopic", tags=["topics"])
async def purge_topic(request: Request[Any, Any, Any], topic: FromPath[str]) -> None:
    """Remove all messages that a topic has now."""
    await call_of(request).access.purge_topic(topic)


def _topic(topic: TopicState) -> TopicOut:
    return TopicOut(
        topic.name,
        Keep(topic.keep),
        topic.journal,
        topic.partition_count,
        topic.messages,
        topic.subscribers,
        topic.rule,
        topic.last_value,
        topic.retain,
    )


def _partition(number: int, state: PartitionState) -> TopicPartition:
    owner = state.owner
    return TopicPartition(
        number, state.first_offset, state.next_offset, owner.journal, owner.shard, owner.epoch
    )


# --- Policies ---


class RotateOut(msgspec.Struct, frozen=True):
    """When a new segment begins."""

    bytes: int
    every_ns: int | None
    at_ns: Annotated[int, msgspec.Meta(description="Time of the UTC day.")]


class RetainOut(msgspec.Struct, frozen=True):
    """When messages are removed. Without any limit they are kept for ever."""

    age_ns: int | None
    bytes: int | None
    until: str | None


class PinOut(msgspec.Struct, frozen=True):
    """The ceiling of all holds: beyond it, held messages are removed too."""

    age_ns: int | None
    bytes: int | None


class PolicyOut(msgspec.Struct, frozen=True):
    """How a topic is kept, or would be. `keep`, `partitions` and `journal` are fixed when it is made."""

    topic: str
    exists: bool
    rule: str | None
    keep: Keep
    partitions: int
    journal: str
    rotate: RotateOut
    retain: RetainOut
    pin: PinOut
    last_value: bool


@get("/v1/policies", operation_id="describePolicy", tags=["topics"], sync_to_thread=False)
def describe_policy(
    request: Request[Any, Any, Any],
    topic: Annotated[str, QueryParameter(description="A topic that exists, or would be made.")],
) -> PolicyOut:
    """Describe the policy that a topic has, or would get."""
    check_topic(topic)
    call = call_of(request)
    route = call.access.routes((topic,))[0]
    policies = call.access.policies
    if route.exists and route.keep != Keep.NONE:
        fixed = FixedPolicy(
            keep=Keep(route.keep), partitions=len(route.owners), journal=route.owners[0].journal
        )
        policy = policies.for_recorded(topic, fixed)
    else:
        policy = policies.for_topic(topic)
    rotate, retain, pin = policy.rotate, policy.retain, policy.pin
    return PolicyOut(
        topic,
        route.exists,
        policy.rule,
        policy.keep,
        policy.partitions,
        policy.journal,
        RotateOut(rotate.bytes_max, rotate.every_ns, rotate.at_ns),
        RetainOut(retain.age_ns, retain.bytes_max, retain.until),
        PinOut(pin.age_ns, pin.bytes_max),
        policy.last_value,
    )


topic_handlers = [
    list_topics,
    describe_topic,
    delete_topic,
    purge_topic,
    describe_policy,
]
