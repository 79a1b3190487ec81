"""Acknowledged work over HTTP for tests: verbs that check the status, and the fields of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import httpx

from runnel.protocols.http.consumers.polling_consumers import PollingConsumers
from tests.protocols.http.scene import HttpScene, until

Json = dict[str, Any]


class Workplace:
    """One subscription, as one caller uses it."""

    def __init__(self, scene: HttpScene, name: str = "jobs", *, token: str | None = None) -> None:
        self.scene = scene
        self.name = name
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    @property
    def path(self) -> str:
        return f"/v1/subscriptions/{self.name}"

    @property
    def polling_consumers(self) -> PollingConsumers:
        return self.scene.listener.server.polling_consumers

    async def ask(self, method: str, path: str = "", **kwargs: Any) -> httpx.Response:
        return await self.scene.http.request(
            method, self.path + path, headers=self._headers, **kwargs
        )

    async def make(self, *patterns: str, mode: str = "shared", **options: Any) -> Json:
        body = {"patterns": patterns or ["a"], "mode": mode, "options": options}
        return _good(await self.ask("PUT", json=body))

    async def state(self) -> Json:
        return _good(await self.ask("GET"))

    async def take(self, **query: Any) -> list[Json]:
        answer = _good(await self.ask("POST", "/messages", params=query))
        return list(answer["messages"])

    async def ack(self, messages: Iterable[Json]) -> Json:
        return _good(await self.ask("POST", "/ack", json={"acks": _ids(messages)}))

    async def nack(self, messages: Iterable[Json], **how: Any) -> Json:
        return _good(await self.ask("POST", "/nack", json={"acks": _ids(messages), **how}))

    async def extend(self, messages: Iterable[Json], **how: Any) -> Json:
        return _good(await self.ask("POST", "/extend", json={"acks": _ids(messages), **how}))

    def in_flight(self) -> int:
        """As the broker counts it."""
        subscription = self.scene.broker.consumer_groups._subscriptions.get(self.name)
        return sum(
            consumer_group.group.in_flight
            for consumer_group in subscription.consumer_groups.values()
        )

    def consumers(self) -> int:
        subscription = self.scene.broker.consumer_groups._subscriptions.get(self.name)
        return sum(
            consumer_group.consumers for consumer_group in subscription.consumer_groups.values()
        )

    async def vanish_while_waiting(self, **query: Any) -> None:
        """Ask, wait until the broker knows, and be gone."""
        asking = asyncio.get_running_loop().create_task(self.take(wait="60", **query))
        streams = self.scene.listener.server
        waiting = streams.stream_count
        await until(lambda: streams.stream_count > waiting)
        asking.cancel()
        await asyncio.wait({asking})


def _ids(messages: Iterable[Json]) -> list[str]:
    return [message["ack"] for message in messages]


def _good(answer: httpx.Response) -> Json:
    assert answer.status_code in (200, 201), answer.text
    found = answer.json()
    assert isinstance(found, dict)
    return found


def texts(messages: Iterable[Json]) -> list[str]:
    return [message["text"] for message in messages]


def problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["code"]
