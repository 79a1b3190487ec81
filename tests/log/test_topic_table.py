"""Topics and partitions in memory, and the numbering of batches."""

from __future__ import annotations

import pytest

from runnel.config import TopicRule
from runnel.errors import ClientFault, InvalidNameError, LimitExceededError, UnknownTopicError
from runnel.log.log import ShardId
from runnel.log.metadata.topic_table import Partition, Topic, TopicTable, number_runs
from runnel.topics.partitions import shard_of_partition
from runnel.topics.policies import Policies
from tests.log.samples import batch, one

RULES = Policies([TopicRule(match="p/*", partitions=3, journal="main"), TopicRule(match="far")])


def table(topics_max: int = 100) -> TopicTable:
    return TopicTable(RULES, topics_max)


def test_topic_is_made_once_with_its_policy() -> None:
    made: list[str] = []
    topics = TopicTable(RULES, 100, lambda topic: made.append(topic.name))
    topic = topics.ensure("p/1")
    assert topics.ensure("p/1") is topic
    assert made == ["p/1"]
    assert [partition.key for partition in topic.partitions] == [("p/1", 0), ("p/1", 1), ("p/1", 2)]
    assert topic.info().shards == [ShardId("main")] * 3
    assert topics.names() == ["p/1"]


def test_limit_counts_topics_that_were_deleted_too_but_lets_them_come_back() -> None:
    topics = table(topics_max=2)
    topics.ensure("a")
    topics.ensure("b")
    topics.delete("a")
    with pytest.raises(LimitExceededError, match=r"limits.topics_max = 2"):
        topics.ensure("c")
    topics.ensure("a")
    assert sorted(topics.names()) == ["a", "b"]


def test_bad_name_makes_nothing() -> None:
    topics = table()
    with pytest.raises(InvalidNameError):
        topics.ensure("a\n")
    assert len(topics) == 0


def test_deleted_topic_is_not_found_but_its_numbers_stay() -> None:
    topics = table()
    topics.ensure("a").partitions[0].advance(10)
    topics.delete("a")
    assert topics.find("a") is None
    with pytest.raises(UnknownTopicError):
        topics.partition("a", 0)
    recorded = topics.recorded_partition("a", 0)
    assert recorded is not None
    assert recorded.next_offset == 10
    again = topics.ensure("a").partitions[0]
    assert (again.next_offset, again.visible_next, again.floor) == (10, 10, 10)


def test_topic_that_could_not_be_recorded_leaves_what_was_there_before() -> None:
    topics = table()
    topics.ensure("a").partitions[0].advance(5)
    topics.delete("a")
    again = topics.ensure("a")
    topics.forget(again)
    assert topics.find("a") is None
    assert topics.ensure("a").partitions[0].next_offset == 5
    new = topics.ensure("new")
    topics.forget(new)
    assert topics.recorded_partition("new", 0) is None
    topics.forget(new)  # once more does no harm
    assert len(topics) == 1


def test_refusal_by_whoever_records_reaches_the_caller() -> None:
    def refuse(topic: Topic) -> None:
        topics.forget(topic)
        raise ClientFault("not here")

    topics = TopicTable(RULES, 10, refuse)
    with pytest.raises(ClientFault, match=r"^not here"):
        topics.resolve(one("a", b"x").envelope)
    assert len(topics) == 0


def test_advancing_never_goes_back() -> None:
    partition = Partition(("a", 0), ShardId("main"))
    partition.advance(7)
    partition.advance(3)
    assert (partition.next_offset, partition.visible_next) == (7, 7)


def test_runs_are_resolved_to_their_partitions() -> None:
    topics = table()
    envelope = batch(("a", [b"1"]), ("p/1", [b"2"], 2), ("a", [b"3"])).envelope
    resolved = topics.resolve(envelope)
    assert [partition.key for partition in resolved] == [("a", 0), ("p/1", 2), ("a", 0)]
    assert resolved[0] is resolved[2]


def test_run_for_another_shard_or_an_unknown_partition_is_named() -> None:
    topics = table()
    with pytest.raises(
        ClientFault, match="run 1: 'far' lies in shard far/0, the runs before it in"
    ):
        topics.resolve(batch(("a", [b"1"]), ("far", [b"2"])).envelope)
    with pytest.raises(UnknownTopicError, match="run 1: topic 'p/1' has partitions 0 to 2, not 3"):
        topics.resolve(batch(("a", [b"1"]), ("p/1", [b"2"], 3)).envelope)


def test_run_that_is_the_only_one_needs_no_number() -> None:
    topics = table()
    with pytest.raises(UnknownTopicError, match=r"^topic 'p/1' has partitions 0 to 2, not 3"):
        topics.resolve(batch(("p/1", [b"1"], 3)).envelope)


def test_numbers_fill_in_the_brokers_part_and_move_on() -> None:
    topics = table()
    sent = batch(("a", [b"1", b"2"]), ("b", [b"3"]), ("a", [b"4"]))
    partitions = topics.resolve(sent.envelope)
    partitions[0].advance(11)
    head = number_runs(sent.envelope, partitions, shard=4, epoch=3, entry=9, receive_time_ns=-5)
    assert head.column64(head.base_offsets) == [11, 1, 13]
    assert head.column64(head.receive_times) == [-5] * 3
    assert head.column64(head.epochs) == [3] * 3
    assert head.entry == 9
    assert head.shard == 4
    assert partitions[0].next_offset == 14
    assert partitions[0].visible_next == 11  # until it is stored
    assert sent.envelope.base_offsets == b""


SPLIT = Policies(
    [
        TopicRule(match="p/*", partitions=3, journal="main"),
        TopicRule(match="own/*", partitions=3, journal="{topic}"),
    ]
)


def shards_by_rule(name: str, journal: str, shards: int) -> list[ShardId]:
    return [ShardId(journal, shard_of_partition(name, number, shards)) for number in range(3)]


def test_partitions_of_a_journal_with_several_shards_are_spread_by_the_rule() -> None:
    topics = TopicTable(SPLIT, 100, journal_shards=4)
    foreseen = topics.shards_of_new("p/1", SPLIT.for_topic("p/1"))
    assert topics.shard_count("main") is None
    assert topics.ensure("p/1").info().shards == foreseen == shards_by_rule("p/1", "main", 4)
    assert topics.shard_count("main") == 4
    assert all(topics.uses(ShardId("main", shard)) for shard in range(4))
    assert not topics.uses(ShardId("main", 4))


def test_journal_that_a_template_names_has_one_shard() -> None:
    topics = TopicTable(SPLIT, 100, journal_shards=4)
    assert topics.ensure("own/a").info().shards == [ShardId("own/a")] * 3


def test_journal_keeps_its_number_of_shards() -> None:
    topics = TopicTable(SPLIT, 100, journal_shards=4)
    topics.restore_journal("main", 2)
    assert topics.ensure("p/1").info().shards == shards_by_rule("p/1", "main", 2)
    found = TopicTable(SPLIT, 100, journal_shards=4)
    found.restore("p/1", SPLIT.for_topic("p/1"))  # of a journal without a record
    assert found.ensure("p/2").info().shards == [ShardId("main")] * 3


def test_topics_move_when_the_right_number_of_shards_is_found() -> None:
    topics = TopicTable(SPLIT, 100, journal_shards=4)
    topic = topics.restore("p/1", SPLIT.for_topic("p/1"))
    topics.restore_journal("main", 4)
    assert topic.info().shards == shards_by_rule("p/1", "main", 4)


def test_batch_for_several_shards_of_a_journal_is_refused() -> None:
    topics = TopicTable(SPLIT, 100, journal_shards=4)
    names = ["p/1", "p/2", "p/3", "p/4", "p/5"]
    assert len({shard_of_partition(name, 0, 4) for name in names}) > 1
    with pytest.raises(ClientFault, match="a batch goes to one shard"):
        topics.resolve(batch(*((name, [b"x"]) for name in names)).envelope)
