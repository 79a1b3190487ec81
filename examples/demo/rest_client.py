"""The web shop: orders over REST, invoices as server-sent events, with Python's standard library and nothing else.

python -m examples.demo.rest_client http://127.0.0.1:7480 [NUMBER OF THE FIRST ORDER]
"""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote, urlsplit

from examples.demo.shop import NoAnswerError, RefusedError, Shop
from examples.demo.world import OrderSource

_ANSWER_MAX_S: Final = 10.0
_SILENCE_MAX_S: Final = 40.0  # a stream says something every 15 seconds
_RETRIABLE: Final = 500


class RestShopClient:
    """One connection, which is opened again after a loss."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url).netloc
        self._connection: http.client.HTTPConnection | None = None
        self._event_id: str | None = None

    def publish(self, topic: str, payload: bytes, event_time_ns: int) -> int:
        headers = {
            "Content-Type": "application/octet-stream",
            "Runnel-Event-Time": str(event_time_ns),
        }
        answer = self._ask("POST", f"/v1/topics/{quote(topic)}/messages", payload, headers)
        return int(answer["offset"])

    def has(self, topic: str, offset: int) -> bool:
        path = f"/v1/topics/{quote(topic)}/messages?offset={offset}&limit=1"
        answer = self._ask("GET", path, None, {}, absent=(404, 416))
        return bool(answer.get("messages"))

    def follow(self, topic: str, *, from_now: bool) -> Iterator[int]:
        """Like EventSource in a browser: it continues after the id of the last event."""
        start = "latest" if from_now else "earliest"
        headers = {} if self._event_id is None else {"Last-Event-ID": self._event_id}
        connection = http.client.HTTPConnection(self._address, timeout=_SILENCE_MAX_S)
        try:
            connection.request(
                "GET", f"/v1/stream?pattern={quote(topic)}&start={start}", headers=headers
            )
            stream = connection.getresponse()
            _check(stream.status, stream)
            event: dict[str, str] = {}
            for line in stream:
                name, _, value = line.decode().rstrip("\n").partition(":")
                if name:
                    event[name] = value.strip()
                    continue
                self._event_id = event.get("id", self._event_id)  # an empty line ends an event
                if event.get("event") == "message":
                    yield int(json.loads(event["data"])["offset"])
                event = {}
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError from error
        finally:
            connection.close()
        raise NoAnswerError  # the broker ended the stream

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        absent: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._address, timeout=_ANSWER_MAX_S)
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            if answer.status in absent:
                answer.read()
                return {}
            _check(answer.status, answer)
            found: dict[str, Any] = json.loads(answer.read())
            return found
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            self._connection = None
            raise NoAnswerError from error


def _check(status: int, answer: http.client.HTTPResponse) -> None:
    if status >= _RETRIABLE:
        answer.read()
        raise NoAnswerError
    if status >= http.client.BAD_REQUEST:
        raise RefusedError(answer.read().decode())


def main() -> None:
    url, first = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    Shop(RestShopClient(url), RestShopClient(url), OrderSource.WEB, first).run()


if __name__ == "__main__":
    main()
