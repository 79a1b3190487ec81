"""Topics, cursors, subscriptions, dead letters and statistics over gRPC."""

from __future__ import annotations

import json

from grpc import StatusCode

from runnel.protocols.grpc.generated import runnel_pb2 as pb
from tests.protocols.grpc.scene import failure, opened, publish, run


def test_routes_are_told_of_topics_that_do_not_exist() -> None:
    async def scenario() -> None:
        async with opened() as scene:
            request = pb.ListRoutesRequest(topics=["parted/x", "live/y"])
            parted, live = (await scene.stub.ListRoutes(request)).routes
            assert (len(parted.owners), parted.exists, live.keep) == (4, False, "none")

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
