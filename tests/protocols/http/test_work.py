"""Acknowledged work over HTTP: only the requesting consumer gets a lease, and only it settles it, once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from runnel.broker.consumer_groups import WorkDelivery
from runnel.config import Authentication, HttpSettings, SecuritySettings
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from runnel.protocols.http.consumers.recent_acks import ACKED_MAX, RecentAcks
from runnel.security.rights import Grant
from runnel.security.tokens import TokenFile, new_token
from tests.protocols.http.scene import in_loop, open_scene, until
from tests.protocols.http.workplace import Json, Workplace, problem, texts

SECOND_NS = 10**9


# --- Taking and acknowledging ---


@in_loop
async def test_a_message_is_taken_once_and_done_when_acknowledged() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        await scene.publish("a", b"1", b"2")
        [first] = await work.take()
        [second] = await work.take()
        assert (first["text"], first["attempt"]) == ("1", 1)
        assert second["text"] == "2"
        assert await work.take() == []
        assert await work.ack([first, second]) == {"acked": 2, "late": []}
        assert (await work.state())["members"][0]["backlog"] == 0


@in_loop
async def test_a_request_gets_no_more_than_it_wants_and_nothing_else_is_leased() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        await scene.publish("a", *(b"%d" % number for number in range(100)))
        for in_flight in range(7, 99, 7):
            assert len(await work.take(limit=7)) == 7
            assert work.in_flight() == in_flight
        assert len(await work.take(limit=7)) == 2
        assert work.in_flight() == 100


@in_loop
async def test_acknowledging_leases_nothing_more() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        await scene.publish("a", *(b"%d" % number for number in range(10)))
        messages = await work.take(limit=5)
        await work.ack(messages[:3])
        assert work.in_flight() == 2


@in_loop
async def test_bytes_limit_a_request_and_one_message_always_comes() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        for _ in range(20):
            await scene.publish("a", b"x" * 10_000)
        assert len(await work.take(limit=20, bytes=1)) == 1
        assert 1 < len(await work.take(limit=20, bytes=50_000)) < 8
        assert len(await work.take(limit=20, bytes=1)) == 1


@in_loop
async def test_a_waiting_request_is_answered_as_soon_as_a_message_is_there() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        waiting = asyncio.get_running_loop().create_task(work.take(wait="30s"))
        await until(lambda: scene.listener.server.stream_count == 1)
        await scene.publish("a", b"1")
        assert texts(await waiting) == ["1"]
        assert scene.listener.server.stream_count == 0


@in_loop
async def test_a_waiting_request_ends_empty_when_its_time_is_over() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        waiting = asyncio.get_running_loop().create_task(work.take(wait=5))
        await until(lambda: scene.listener.server.stream_count == 1)
        scene.clock.advance(5 * SECOND_NS)
        assert await waiting == []
        await scene.publish("a", b"1")
        assert work.in_flight() == 0


@in_loop
async def test_requests_of_one_consumer_are_served_in_their_order() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        waiting = []
        for number in range(5):
            waiting.append(
                asyncio.get_running_loop().create_task(work.take(wait=30, consumer="me"))
            )
            await until(lambda count=number + 1: scene.listener.server.stream_count == count)  # type: ignore[misc]
        await scene.publish("a", *(b"%d" % number for number in range(5)))
        assert [texts(await each) for each in waiting] == [[f"{n}"] for n in range(5)]


@in_loop
async def test_one_behind_another_that_waits_longer_ends_in_its_own_time() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        loop = asyncio.get_running_loop()
        first = loop.create_task(work.take(wait=30, consumer="me"))
        await until(lambda: scene.listener.server.stream_count == 1)
        second = loop.create_task(work.take(wait=1, consumer="me"))
        await until(lambda: scene.listener.server.stream_count == 2)
        scene.clock.advance(SECOND_NS)
        assert await second == []
        await scene.publish("a", b"1")
        assert texts(await first) == ["1"]


@in_loop
async def test_compressed_messages_are_given_like_others() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        messages = [Message("a", b"x" * 100) for _ in range(10)]
        await scene.broker.publish(Batch.from_messages(messages, codec=Codec.LZ4))
        assert texts(await work.take(limit=10)) == ["x" * 100] * 10


@in_loop
async def test_an_ack_that_is_said_again_is_acknowledged_again() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        await scene.publish("a", b"1", b"2", b"3")
        first, second, third = await work.take(limit=3)
        assert await work.ack([first, second]) == {"acked": 2, "late": []}
        assert await work.ack([first, second]) == {"acked": 2, "late": []}
        assert await work.ack([second, third]) == {"acked": 2, "late": []}
        counters = scene.broker.metrics.counters
        assert (counters.work_acked, counters.work_late) == (3, 0)


@in_loop
async def test_what_was_acknowledged_cannot_fail_any_more_nor_be_extended() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        await scene.publish("a", b"1", b"2")
        first, second = await work.take(limit=2)
        await work.ack([first])
        for verb in ("/nack", "/extend"):
            answer = await work.ask("POST", verb, json={"acks": [first["ack"]]})
            assert problem(answer) == (409, "late_ack")
        await work.nack([second])
        answer = await work.ask("POST", "/ack", json={"acks": [second["ack"]]})
        assert problem(answer) == (409, "late_ack")
        assert "settled otherwise" in answer.json()["detail"]
        assert await work.ack([first]) == {"acked": 1, "late": []}


@in_loop
async def test_an_ack_is_remembered_for_a_minute() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make(lease_ms=200_000)
        await scene.publish("a", b"1", b"2")
        done, _ = await work.take(limit=2)  # with the other the consumer stays
        await work.ack([done])
        scene.clock.advance(59 * SECOND_NS)
        assert await work.ack([done]) == {"acked": 1, "late": []}
        scene.clock.advance(SECOND_NS)
        answer = await work.ask("POST", "/ack", json={"acks": [done["ack"]]})
        assert problem(answer) == (409, "late_ack")


def test_no_more_acks_are_remembered_than_a_request_may_name() -> None:
    acked = RecentAcks()
    acked.add([(1, offset) for offset in range(ACKED_MAX)], 0)
    acked.add([(2, 5), (2, 2**62)], 0)
    assert len(acked) == ACKED_MAX
    assert acked.unknown({1: [0, 1, 2], 2: [5, 2**62], 3: [0]}) == {1: [0, 1], 3: [0]}


# --- Failing, and time ---


@in_loop
async def test_a_lease_is_as_long_as_the_request_says() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make(lease_ms=10_000)
        await scene.publish("a", b"1", b"2")
        [short] = await work.take(lease="1s")
        [long] = await work.take(lease="60s")
        scene.clock.advance(SECOND_NS)
        [again] = await work.take(limit=2, wait=1)
        assert again["text"] == short["text"]
        scene.clock.advance(58 * SECOND_NS)
        assert await work.ack([long]) == {"acked": 1, "late": []}


@in_loop
async def test_leases_that_end_while_a_request_waits_do_not_flood_it() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make(lease_ms=10_000)
        await scene.publish("a", *(b"%d" % number for number in range(5)))
        assert len(await work.take(limit=5, consumer="me")) == 5
        waiting = asyncio.get_running_loop().create_task(work.take(limit=1, consumer="me", wait=60))
        await until(lambda: scene.listener.server.stream_count == 1)
        scene.clock.advance(10 * SECOND_NS)
        assert len(await waiting) == 1
        assert work.in_flight() == 1


@in_loop
async def test_acks_while_a_request_waits_do_not_flood_it() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make(retry_delay_ms=0)
        await scene.publish("a", *(b"%d" % number for number in range(5)))
        taken = await work.take(limit=5, consumer="me")
        waiting = asyncio.get_running_loop().create_task(work.take(limit=1, consumer="me", wait=60))
        await until(lambda: scene.listener.server.stream_count == 1)
        await work.nack(taken)
        assert [each["attempt"] for each in await waiting] == [2]
        assert work.in_flight() == 1


# --- Keys ---


@pytest.mark.parametrize("limit", [1, 3])
@in_loop
async def test_later_ones_of_a_key_in_the_same_nack_do_not_count_as_failed(limit: int) -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make(mode="key_shared")
        await scene.publish_all(*(Message("a", b"%d" % number, b"x") for number in range(3)))
        taken: list[Json] = []
        while len(taken) < 3:
            taken += await work.take(consumer="one", limit=limit)
        await work.nack(taken, delay=0)
        again = await work.take(consumer="two", limit=3, wait=1)
        assert [(each["text"], each["attempt"]) for each in again] == [("0", 2), ("1", 1), ("2", 1)]


@in_loop
async def test_polling_consumers_without_a_name_do_not_share_keys() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make(mode="key_shared")
        await scene.publish_all(*(Message("a", b"%d" % number, b"x") for number in range(3)))
        assert len(await work.take()) == 1
        assert await work.take() == []


# --- Vanishing, leaving, ending ---


@in_loop
async def test_a_request_that_vanishes_while_it_waits_leaves_nothing_leased() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        await work.vanish_while_waiting(limit=10, consumer="gone")
        await until(lambda: scene.listener.server.stream_count == 0)
        await scene.publish("a", b"1", b"2")
        assert work.in_flight() == 0
        assert [each["attempt"] for each in await work.take(limit=2, consumer="here")] == [1, 1]


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("has_more", [True, False])
@in_loop
async def test_messages_that_come_at_the_moment_of_vanishing_go_back_uncounted(
    is_before: bool, has_more: bool
) -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        working = []
        if has_more:
            await scene.publish("a", b"0")
            working = await work.take(consumer="gone")
        asking = asyncio.get_running_loop().create_task(work.take(wait=60, consumer="gone"))
        await until(lambda: scene.listener.server.stream_count == 1)
        [connection] = [each for each in scene.listener.server.connections if each.is_busy]
        [owned] = work.polling_consumers._by_id.values()
        deliver = owned.polling.deliver_work

        def vanish_while(consumer: int, deliveries: Sequence[WorkDelivery]) -> None:
            if is_before:
                connection.transport.abort()
            deliver(consumer, deliveries)
            connection.transport.abort()

        owned.polling.deliver_work = vanish_while  # type: ignore[method-assign]
        await scene.publish("a", b"1")
        await asyncio.wait({asking})
        assert asking.exception() is not None
        await until(lambda: scene.listener.server.stream_count == 0)
        await until(lambda: work.in_flight() == len(working))
        [again] = await work.take(consumer="here", wait=1)
        assert (again["text"], again["attempt"]) == ("1", 1)
        assert (await work.ack([*working, again]))["late"] == []


@in_loop
async def test_leaving_ends_a_request_that_waits() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        waiting = asyncio.get_running_loop().create_task(work.take(wait=60, consumer="me"))
        await until(lambda: scene.listener.server.stream_count == 1)
        await work.ask("DELETE", "/consumers/me")
        assert await waiting == []


@in_loop
async def test_a_polling_consumer_ends_when_it_was_idle_for_a_while_and_has_no_lease() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make(lease_ms=200_000)
        await scene.publish("a", b"1", b"2")
        taken = await work.take(consumer="busy")
        await work.ack(await work.take(consumer="idle"))
        for _ in range(61):
            scene.clock.advance(SECOND_NS)
            await asyncio.sleep(0)
        await until(lambda: len(work.polling_consumers) == 1)
        assert work.consumers() == 1
        await work.ack(taken)
        for _ in range(61):
            scene.clock.advance(SECOND_NS)
            await asyncio.sleep(0)
        await until(lambda: len(work.polling_consumers) == 0)
        assert work.consumers() == 0


@in_loop
async def test_idle_consumers_make_room_for_others_and_busy_ones_do_not() -> None:
    async with open_scene(http=HttpSettings(consumers_max=2)) as scene:
        work = Workplace(scene)
        await work.make()
        await scene.publish("a", b"1", b"2", b"3")
        first = await work.take(consumer="1")
        await work.take(consumer="2")
        answer = await work.ask("POST", "/messages", params={"consumer": "3"})
        assert problem(answer) == (429, "limit_exceeded")
        await work.ack(first)
        assert texts(await work.take(consumer="3")) == ["3"]
        assert len(work.polling_consumers) == 2


@in_loop
async def test_a_subscription_that_is_deleted_ends_a_request_that_waits() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        loop = asyncio.get_running_loop()
        waiting = loop.create_task(work.ask("POST", "/messages", params={"wait": "60"}))
        await until(lambda: scene.listener.server.stream_count == 1)
        assert (await work.ask("DELETE")).status_code == 204
        assert problem(await waiting) == (404, "unknown_subscription")
        assert len(work.polling_consumers) == 0


@in_loop
async def test_a_member_that_is_replaced_is_told() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make(mode="multicast")
        loop = asyncio.get_running_loop()
        query = {"wait": "60", "member": "m", "consumer": "one"}
        waiting = loop.create_task(work.ask("POST", "/messages", params=query))
        await until(lambda: scene.listener.server.stream_count == 1)
        await work.take(member="m", consumer="two")
        assert problem(await waiting) == (409, "member_replaced")
        await scene.publish("a", b"1")
        assert texts(await work.take(member="m", consumer="two", wait=1)) == ["1"]


@in_loop
async def test_waiting_requests_end_empty_when_the_broker_goes() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        loop = asyncio.get_running_loop()
        waiting = loop.create_task(work.take(wait=60))
        await until(lambda: scene.listener.server.stream_count == 1)
        draining = loop.create_task(scene.listener.drain())
        assert await waiting == []
        assert await draining
        await until(lambda: len(work.polling_consumers) == 0)


@in_loop
async def test_polling_consumers_leave_with_the_listener_while_the_broker_stays() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        await scene.publish("a", b"1")
        assert len(await work.take()) == 1
        await scene.listener.close()
        assert (work.in_flight(), work.consumers()) == (0, 0)


@in_loop
async def test_no_more_requests_wait_than_the_settings_allow() -> None:
    async with open_scene(http=HttpSettings(streams_max=1)) as scene:
        work = Workplace(scene)
        await work.make()
        waiting = asyncio.get_running_loop().create_task(work.take(wait=60, consumer="1"))
        await until(lambda: scene.listener.server.stream_count == 1)
        answer = await work.ask("POST", "/messages", params={"wait": 60, "consumer": "2"})
        assert problem(answer) == (429, "limit_exceeded")
        await scene.publish("a", b"1")
        assert texts(await waiting) == ["1"]


# --- Whose it is ---


@in_loop
async def test_a_polling_consumer_is_its_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    tokens = TokenFile(path)
    one = _added(tokens, "one", "consume:a", "admin:a")
    two = _added(tokens, "two", "consume:a")
    none = _added(tokens, "none", "read:a")
    security = SecuritySettings(authentication=Authentication.TOKEN, tokens_file=str(path))
    async with open_scene(security=security) as scene:
        work, other, stranger = (Workplace(scene, token=token) for token in (one, two, none))
        await work.make()
        await scene.publish("a", b"1", b"2")
        taken = await work.take(consumer="me")
        answer = await other.ask("POST", "/ack", json={"acks": [taken[0]["ack"]]})
        assert problem(answer) == (403, "forbidden")
        assert problem(await other.ask("DELETE", "/consumers/me")) == (404, "unknown_subscription")
        answer = await stranger.ask("POST", "/messages", params={"consumer": "me"})
        assert problem(answer) == (403, "forbidden")
        assert texts(await other.take(consumer="me")) == ["2"]
        assert len(work.polling_consumers) == 2
        assert await work.ack(taken) == {"acked": 1, "late": []}
        assert problem(await other.ask("DELETE")) == (403, "forbidden")


def _added(tokens: TokenFile, name: str, *allow: str) -> str:
    token, text = new_token(name, [Grant.parse(each) for each in allow], now_ns=0)
    with tokens.changing() as known:
        known.append(token)
    return text


# --- What is wrong ---


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/ack", {"acks": []}, "$.acks"),
        ("/ack", {"acks": ["nonsense"]}, "$.acks[0]"),
        ("/ack", {"acks": ["a.1.1", "a.1.-1"]}, "$.acks[1]"),
        ("/ack", {"acks": "a.1.1"}, "$.acks"),
        ("/ack", {}, "$"),
        ("/ack", {"acks": ["a.1.1"], "delay": 1}, "$.delay"),
        ("/nack", {"acks": ["a.1.1"], "delay": "soon"}, "$.delay"),
        ("/nack", {"acks": ["a.1.1"], "delay": -1}, "$.delay"),
        ("/extend", {"acks": ["a.1.1"], "lease": "1ms"}, "$.lease"),
        ("/move", {"start": {"kind": "time"}}, "$.start.time"),
        ("/move", {"start": {"kind": "offsets"}}, "$.start.places"),
        ("/move", {"start": {"kind": "middle"}}, "$.start.kind"),
        ("/dead/redrive", {}, "$.offsets"),
        ("/dead/drop", {"all": True, "offsets": [1]}, "$.offsets"),
    ],
)
@in_loop
async def test_a_wrong_body_is_answered_with_its_field(
    path: str, body: dict[str, object], field: str
) -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        answer = await work.ask("POST", path, json=body)
        assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"bytes": 0}, "bytes"),
        ({"wait": "soon"}, "wait"),
        ({"lease": "1ms"}, "lease"),
        ({"payload": "xml"}, "payload"),
    ],
)
@in_loop
async def test_a_wrong_question_is_answered_with_its_field(
    query: dict[str, str], field: str
) -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        await work.make()
        answer = await work.ask("POST", "/messages", params=query)
        assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text


@in_loop
async def test_an_ack_of_another_subscription_is_refused() -> None:
    async with open_scene() as scene:
        work, other = Workplace(scene), Workplace(scene, "others")
        await work.make()
        await other.make()
        await scene.publish("a", b"1")
        taken = await work.take()
        answer = await other.ask("POST", "/ack", json={"acks": [taken[0]["ack"]]})
        assert (answer.status_code, answer.json()["field"]) == (400, "$.acks[0]")


# --- Subscriptions ---


@in_loop
async def test_a_subscription_is_made_once_and_must_be_the_same() -> None:
    async with open_scene() as scene:
        work = Workplace(scene)
        body = {"patterns": ["a"], "mode": "shared"}
        assert (await work.ask("PUT", json=body)).status_code == 201
        assert (await work.ask("PUT", json=body)).status_code == 200
        changed = await work.ask("PUT", json={**body, "options": {"lease_ms": 5000}})
        assert changed.json()["options"]["lease_ms"] == 5000
        answer = await work.ask("PUT", json={**body, "patterns": ["b"]})
        assert problem(answer) == (409, "subscription_differs")
        answer = await work.ask("PUT", json={**body, "mode": "key_shared"})
        assert problem(answer) == (409, "subscription_differs")
        listed = (await scene.http.get("/v1/subscriptions")).json()["subscriptions"]
        assert [each["name"] for each in listed] == ["jobs"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("DELETE", "/members/m"),
        ("GET", "/dead"),
        ("POST", "/messages"),
    ],
)
@in_loop
async def test_what_is_not_there_is_not_found(method: str, path: str) -> None:
    async with open_scene() as scene:
        work = Workplace(scene, "n%2Fone")
        assert problem(await work.ask(method, path)) == (404, "unknown_subscription")


@in_loop
async def test_taking_from_a_subscription_that_is_not_there_says_what_makes_it() -> None:
    async with open_scene() as scene:
        answer = await Workplace(scene, "n%2Fone").ask("POST", "/messages")
        assert answer.json()["detail"] == (
            "subscription 'n/one' does not exist; PUT /v1/subscriptions/n%2Fone makes it"
        )
