"""Topics, policies, cursors, connections, figures and health over HTTP."""

from __future__ import annotations

from runnel.config import Keep, Retain, TopicRule
from tests.protocols.http.scene import in_loop, open_scene

RULES = (
    TopicRule(match="p/*", partitions=2, retain=Retain(age_ns=7)),
    TopicRule(match="live", keep=Keep.NONE),
)


@in_loop
async def test_topics_are_listed_page_by_page() -> None:
    async with open_scene() as scene:
        for name in ("b", "a", "c"):
            await scene.publish(name, b"1")
        first = (await scene.http.get("/v1/topics", params={"limit": "2"})).json()
        assert [topic["name"] for topic in first["topics"]] == ["a", "b"]
        assert not first["is_complete"]
        rest = (await scene.http.get("/v1/topics", params={"after": "b"})).json()
        assert rest["topics"] == [
            {
                "name": "c",
                "keep": "disk",
                "journal": "main",
                "partition_count": 1,
                "messages": 1,
                "subscribers": 0,
                "rule": None,
                "last_value": False,
                "retain": "",
            }
        ]
        some = (await scene.http.get("/v1/topics", params={"pattern": "[ab]"})).json()
        assert len(some["topics"]) == 2


@in_loop
async def test_a_topic_is_described_purged_and_deleted() -> None:
    async with open_scene(topics=RULES) as scene:
        await scene.publish("p/a", b"1", b"2")
        described = (await scene.http.get("/v1/topics/p/a")).json()
        first = described["partitions"][0]
        assert (first["partition"], first["first_offset"], first["next_offset"]) == (0, 1, 3)
        assert described["partition_count"] == len(described["partitions"]) == 2
        purged = await scene.http.delete("/v1/topics/p%2Fa/messages")
        assert (purged.status_code, purged.content) == (204, b"")
        described = (await scene.http.get("/v1/topics/p/a")).json()
        assert described["partitions"][0]["first_offset"] == 3
        assert (await scene.http.delete("/v1/topics/p/a")).status_code == 204
        assert (await scene.http.get("/v1/topics/p/a")).status_code == 404
        assert (await scene.http.delete("/v1/topics/p/a")).status_code == 404


@in_loop
async def test_policies_are_told_of_topics_that_exist_or_would_be_made() -> None:
    async with open_scene(topics=RULES) as scene:
        await scene.publish("p/a", b"1")
        there = (await scene.http.get("/v1/policies", params={"topic": "p/a"})).json()
        assert (there["exists"], there["rule"], there["partitions"]) == (True, "p/*", 2)
        assert there["retain"] == {"age_ns": 7, "bytes": None, "until": None}
        would = (await scene.http.get("/v1/policies", params={"topic": "live"})).json()
        assert (would["exists"], would["keep"]) == (False, "none")
        missing = await scene.http.get("/v1/policies")
        assert (missing.status_code, missing.json()["field"]) == (400, "topic")


@in_loop
async def test_cursors_are_set_told_and_removed() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1", b"2")
        places = {"places": [{"topic": "a", "partition": 0, "offset": 2}]}
        made = await scene.http.put("/v1/cursors/my/cursor", json=places)
        assert made.status_code == 200
        expected = {
            "name": "my/cursor",
            "updated_ns": scene.clock.time_ns(),
            "updated": "2023-11-14T22:13:20.000000000Z",
            "places": [{"topic": "a", "partition": 0, "offset": 2, "lag": 1}],
        }
        assert made.json() == expected
        assert (await scene.http.get("/v1/cursors/my%2Fcursor")).json() == expected
        assert (await scene.http.get("/v1/cursors")).json() == {
            "cursors": [expected],
            "is_complete": True,
        }
        assert (await scene.http.delete("/v1/cursors/my%2Fcursor")).status_code == 204
        assert (await scene.http.get("/v1/cursors/my%2Fcursor")).status_code == 404


@in_loop
async def test_cursors_subscriptions_and_connections_are_listed_page_by_page() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1")
        for name in ("b", "a", "c"):
            places = {"places": [{"topic": "a", "offset": 1}]}
            await scene.http.put(f"/v1/cursors/{name}", json=places)
            await scene.http.put(f"/v1/subscriptions/{name}", json={"patterns": ["a"]})
        for what in ("cursors", "subscriptions"):
            first = (await scene.http.get(f"/v1/{what}", params={"limit": "2"})).json()
            assert [each["name"] for each in first[what]] == ["a", "b"]
            assert not first["is_complete"]
            rest = (await scene.http.get(f"/v1/{what}", params={"after": "b", "limit": "2"})).json()
            assert [each["name"] for each in rest[what]] == ["c"]
            assert rest["is_complete"]
        own = (await scene.http.get("/v1/connections", params={"limit": "1"})).json()
        [connection] = own["connections"]
        assert (connection["listener"], own["is_complete"]) == ("http", True)
        rest = (await scene.http.get("/v1/connections", params={"after": connection["id"]})).json()
        assert rest == {"connections": [], "is_complete": True}


@in_loop
async def test_wrong_places_are_named() -> None:
    async with open_scene() as scene:
        await scene.publish("a", b"1")
        for body, field in (
            ({"places": [{"topic": "a", "ofset": 1}]}, "$.places[0].ofset"),
            ({"places": [{"topic": "a", "offset": "1"}]}, "$.places[0].offset"),
            ({"place": []}, "$.place"),
            ({"places": []}, "$.places"),
        ):
            answer = await scene.http.put("/v1/cursors/c", json=body)
            assert (answer.status_code, answer.json()["field"]) == (400, field)
        text = await scene.http.put("/v1/cursors/c", content=b"places")
        assert (text.status_code, text.json()["code"]) == (400, "malformed")
        nothing = await scene.http.put("/v1/cursors/c", content=b"")
        assert nothing.status_code == 400
        form = await scene.http.put("/v1/cursors/c", data={"places": "x"})
        assert form.status_code == 415


@in_loop
async def test_connections_tell_what_they_moved() -> None:
    async with open_scene() as scene:
        await scene.http.post("/v1/topics/a/messages", content=b"abc")
        await scene.http.get("/v1/topics/a/messages")
        [row] = (await scene.http.get("/v1/connections")).json()["connections"]
        assert (row["listener"], row["door"]) == ("http", "http")
        assert row["peer"].startswith("127.0.0.1:")
        assert row["client"].startswith("python-httpx")
        assert (row["flow"]["messages_in"], row["flow"]["messages_out"]) == (1, 1)


@in_loop
async def test_figures_are_those_of_the_system_topic() -> None:
    async with open_scene() as scene:
        await scene.http.post("/v1/topics/a/messages", content=b"abc")
        figures = (await scene.http.get("/v1/statistics")).json()
        assert figures["node"] == "node-1"
        assert figures["totals"]["messages_in"] == 1


@in_loop
async def test_health_is_told_to_everybody() -> None:
    async with open_scene() as scene:
        assert (await scene.http.get("/healthz")).json() == {"status": "ok"}
        assert (await scene.http.get("/readyz")).json() == {
            "status": "ready",
            "troubles": [],
            "warnings": [],
        }
        scene.listener.server.closing.set()
        unready = await scene.http.get("/readyz")
        assert unready.status_code == 503
        assert "shutting down" in unready.json()["troubles"][0]
