"""Topics, cursors, subscriptions, dead letters and statistics over gRPC."""

from __future__ import annotations

import json

from grpc import StatusCode

from runnel.formats.batch import Batch
from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import Worker, failure, opened, payloads_of, publish, run


def test_routes_are_told_of_topics_that_do_not_exist() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            request = pb.ListRoutesRequest(topics=["parted/x", "live/y"])
            parted, live = (await scene.stub.ListRoutes(request)).routes
            assert (len(parted.owners), parted.exists, live.keep) == (4, False, "none")

    run(scenario())


def test_a_cursor_is_set_listed_and_removed() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "a", b"1", b"2", b"3")
            places = [pb.CursorPlace(topic="a", offset=2)]
            await scene.stub.SetCursor(pb.SetCursorRequest(name="c", places=places))
            (cursor,) = (await scene.stub.ListCursors(pb.ListCursorsRequest(name="c"))).cursors
            (place,) = cursor.places
            assert (cursor.name, place.topic, place.offset, place.lag) == ("c", "a", 2, 2)
            assert not place.HasField("journal")
            (shard,) = (await scene.stub.ListShards(pb.ListShardsRequest(patterns=["a"]))).shards
            places = [pb.CursorPlace(journal=shard.journal, entry=1, patterns=["a"])]
            await scene.stub.SetCursor(pb.SetCursorRequest(name="d", places=places))
            listed = (await scene.stub.ListCursors(pb.ListCursorsRequest())).cursors
            assert [each.name for each in listed] == ["c", "d"]
            await scene.stub.RemoveCursor(pb.RemoveCursorRequest(name="c"))
            assert len((await scene.stub.ListCursors(pb.ListCursorsRequest())).cursors) == 1
            places = [pb.CursorPlace(topic="a", offset=2**63)]
            failed = await failure(
                scene.stub.SetCursor(pb.SetCursorRequest(name="c", places=places))
            )
            assert (failed.code, "places.offset" in failed.text) == ("bad_request", True)

    run(scenario())


def test_cursors_and_subscriptions_are_listed_page_by_page() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "a", b"1")
            for name in ("b", "a", "c"):
                places = [pb.CursorPlace(topic="a", offset=1)]
                await scene.stub.SetCursor(pb.SetCursorRequest(name=name, places=places))
                await scene.stub.MakeSubscription(
                    pb.MakeSubscriptionRequest(name=name, patterns=["a"], mode=pb.MODE_SHARED)
                )
            cursors = await scene.stub.ListCursors(pb.ListCursorsRequest(limit=2))
            assert ([each.name for each in cursors.cursors], cursors.has_more) == (["a", "b"], True)
            cursors = await scene.stub.ListCursors(pb.ListCursorsRequest(after="b", limit=2))
            assert ([each.name for each in cursors.cursors], cursors.has_more) == (["c"], False)
            request = pb.ListSubscriptionsRequest(limit=2)
            found = await scene.stub.ListSubscriptions(request)
            assert ([each.name for each in found.subscriptions], found.has_more) == (
                ["a", "b"],
                True,
            )
            request = pb.ListSubscriptionsRequest(after="b", limit=2)
            found = await scene.stub.ListSubscriptions(request)
            assert ([each.name for each in found.subscriptions], found.has_more) == (["c"], False)

    run(scenario())


def test_a_subscription_without_a_mode_is_not_made_but_found() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            plain = pb.MakeSubscriptionRequest(name="s", patterns=["t"])
            failed = await failure(scene.stub.MakeSubscription(plain))
            assert (failed.code, failed.status) == ("bad_request", StatusCode.INVALID_ARGUMENT)
            assert "MODE_KEY_SHARED" in failed.text
            listed = await scene.stub.ListSubscriptions(pb.ListSubscriptionsRequest())
            assert not listed.subscriptions
            await scene.stub.MakeSubscription(
                pb.MakeSubscriptionRequest(name="s", patterns=["t"], mode=pb.MODE_KEY_SHARED)
            )
            plain.options.lease_ms = 1234
            await scene.stub.MakeSubscription(plain)
            (found,) = (
                await scene.stub.ListSubscriptions(pb.ListSubscriptionsRequest(name="s"))
            ).subscriptions
            assert (found.mode, found.options.lease_ms) == (pb.MODE_KEY_SHARED, 1234)

    run(scenario())


def test_a_subscription_is_made_paused_moved_and_deleted() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "t", b"1", b"2", b"3")
            make = pb.MakeSubscriptionRequest(
                name="s",
                patterns=["t"],
                mode=pb.MODE_MULTICAST,
                start=pb.Start(kind=pb.Start.KIND_LATEST),
                options=pb.WorkOptions(lease_ms=1234, backoff=1.5),
            )
            await scene.stub.MakeSubscription(make)
            await scene.stub.MakeSubscription(make)
            (made,) = (
                await scene.stub.ListSubscriptions(pb.ListSubscriptionsRequest())
            ).subscriptions
            assert (made.name, made.mode, list(made.patterns)) == ("s", pb.MODE_MULTICAST, ["t"])
            assert (made.options.lease_ms, made.options.backoff) == (1234, 1.5)
            pause = pb.PauseSubscriptionRequest(name="s", is_paused=True)
            await scene.stub.PauseSubscription(pause)
            worker = Worker(scene.stub)
            await worker.open("s", mode=pb.MODE_MULTICAST, member="m")
            places = [pb.PartitionPlace(topic="t", offset=2)]
            move = pb.MoveSubscriptionRequest(
                name="s", start=pb.Start(kind=pb.Start.KIND_OFFSETS, partitions=places), member="m"
            )
            await scene.stub.MoveSubscription(move)
            (found,) = (
                await scene.stub.ListSubscriptions(pb.ListSubscriptionsRequest(name="s"))
            ).subscriptions
            assert found.is_paused
            assert [(each.member, each.floor) for each in found.partitions] == [("m", 2)]
            pause.is_paused = False
            await scene.stub.PauseSubscription(pause)
            assert payloads_of(await worker.take(2)) == [b"2", b"3"]
            await worker.call.done_writing()
            await worker.call.code()
            await scene.stub.RemoveMember(pb.RemoveMemberRequest(name="s", member="m"))
            failed = await failure(
                scene.stub.MoveSubscription(pb.MoveSubscriptionRequest(name="s"))
            )
            assert (failed.code, "start.kind" in failed.text) == ("bad_request", True)
            await scene.stub.DeleteSubscription(pb.DeleteSubscriptionRequest(name="s"))
            failed = await failure(
                scene.stub.ListSubscriptions(pb.ListSubscriptionsRequest(name="s"))
            )
            assert failed.code == "unknown_subscription"

    run(scenario())


def test_dead_letters_are_listed_sent_back_and_dropped() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            worker = Worker(scene.stub)
            options = pb.WorkOptions(deliveries_max=1, retry_delay_ms=0)
            await worker.open("s", "t", options=options)
            await publish(scene, "t", b"1", b"2")
            (lease,) = await worker.take(2)
            await worker.say(nack=pb.Nack(deliveries=[lease.delivery], reason="broken"))
            listing = pb.ListDeadLettersRequest(subscription="s")
            dead = await scene.stub.ListDeadLetters(listing)
            while len(dead.messages) < 2:
                dead = await scene.stub.ListDeadLetters(listing)
            assert [letter.payload for letter in dead.messages] == [b"1", b"2"]
            assert any("broken" in value for value in dead.messages[0].tags.values())
            listing.format = pb.FORMAT_BLOCKS
            blocks = (await scene.stub.ListDeadLetters(listing)).blocks
            assert sum(len(Batch.unpack(each)) for each in blocks) == 2
            settle = pb.SettleDeadLettersRequest(subscription="s", offsets=[1])
            failed = await failure(scene.stub.SettleDeadLetters(settle))
            assert (failed.code, "action" in failed.text) == ("bad_request", True)
            settle.action = settle.ACTION_REDRIVE
            assert (await scene.stub.SettleDeadLetters(settle)).settled == 1
            assert payloads_of(await worker.take(1)) == [b"1"]
            settle = pb.SettleDeadLettersRequest(
                subscription="s", action=settle.ACTION_DROP, all=True
            )
            assert (await scene.stub.SettleDeadLetters(settle)).settled == 1
            settle = pb.SettleDeadLettersRequest(
                subscription="s", action=settle.ACTION_DROP, offsets=range(100_001)
            )
            failed = await failure(scene.stub.SettleDeadLetters(settle))
            assert failed.code == "limit_exceeded"

    run(scenario())


def test_statistics_are_a_json_document() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            await publish(scene, "a", b"1")
            statistics = await scene.stub.GetStatistics(pb.GetStatisticsRequest())
            assert isinstance(json.loads(statistics.json), dict)

    run(scenario())


def test_ping_says_who_is_there() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            pong = await scene.stub.Ping(pb.PingRequest())
            assert (pong.cluster, pong.node) == ("runnel", "node-1")
            assert (pong.message_bytes_max, pong.batch_bytes_max) == (2**20, 2**22)
            assert pong.server.startswith("runnel/")
            assert pong.time_ns > 10**18

    run(scenario())
