"""Requests for a shard that is elsewhere, over HTTP: 503, and when to ask again."""

from __future__ import annotations

from runnel.config import TopicRule
from runnel.log.log import ShardId
from runnel.log.memory import MemoryLog
from tests.protocols.http.scene import in_loop, open_scene

MAIN = ShardId("main")
RULE = TopicRule(match="*", journal="main")


@in_loop
async def test_each_request_is_answered_as_one_to_be_repeated() -> None:
    async with open_scene(topics=(RULE,)) as scene:
        await scene.publish("a", b"1")
        log = scene.broker._stores.main
        assert isinstance(log, MemoryLog)
        await log.release(MAIN)
        messages = "/v1/topics/a/messages"
        for answer in (
            await scene.http.post(messages, json={"text": "2"}),
            await scene.http.get(messages, params={"offset": 1}),
            await scene.http.get("/v1/topics/a"),
            await scene.http.get("/v1/stream", params={"pattern": "*"}),
        ):
            problem = answer.json()
            assert (answer.status_code, problem["code"]) == (503, "moved")
            assert problem["retriable"]
            assert answer.headers["retry-after"] == "1"
        await log.acquire(MAIN)
        answer = await scene.http.post(messages, json={"text": "2"})
        assert (answer.status_code, answer.json()["offset"]) == (200, 2)
