"""The ceiling of the HTTP listener: the same routes in Litestar on uvicorn, with nothing behind them.

Each takes its parameters and the body as it came, and answers JSON of the size that the listener's answers have. Loop,
parser and the settings of uvicorn that cost something are the listener's.
"""

# ruff: noqa: ARG001 - that they take what they have no use for is what is measured

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvicorn
from litestar import Litestar, post

from bench.systems.phases import PAYLOAD
from bench.systems.system import RunningServer, free_port, scratch, serving

_ROOT = Path(__file__).parents[2]


class ReceiptBody(msgspec.Struct, frozen=True):
    topic: str
    partition: int = 0
    offset: int = 123_456
    epoch: int = 1
    receive_time_ns: int = 1_700_000_000_000_000_000
    level: str = "stored"
    receivers: int = 0


class MessageBody(msgspec.Struct, frozen=True):
    topic: str = "work/000"
    partition: int = 0
    offset: int = 123_456
    transmit_time_ns: int = 1_700_000_000_000_000_000
    receive_time_ns: int = 1_700_000_000_000_000_000
    size: int = len(PAYLOAD)
    text: str = PAYLOAD.decode()
    ack: str = "0123456789abcdef01234567"
    attempt: int = 1


class MessagesBody(msgspec.Struct, frozen=True):
    consumer: str
    messages: tuple[MessageBody, ...] = (MessageBody(),)


class AckedBody(msgspec.Struct, frozen=True):
    acked: int = 1
    late: tuple[str, ...] = ()


@post("/v1/topics/{topic:str}/messages", status_code=200)
async def publish(topic: str, body: bytes) -> ReceiptBody:
    return ReceiptBody(topic)


@post("/v1/subscriptions/{name:str}/messages", status_code=200)
async def consume(name: str, consumer: str, limit: int) -> MessagesBody:
    return MessagesBody(consumer)


@post("/v1/subscriptions/{name:str}/ack", status_code=200)
async def acknowledge(name: str, body: bytes) -> AckedBody:
    return AckedBody()


def main(port: int) -> None:
    app = Litestar([publish, consume, acknowledge], openapi_config=None)
    uvicorn.run(
        app,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
    )


@contextmanager
def serve() -> Iterator[RunningServer]:
    with scratch() as directory:
        port = free_port()
        command = [sys.executable, "-m", "bench.systems.empty_litestar", str(port)]
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        with serving(command, port, "http", directory, environment=environment) as served:
            yield served


if __name__ == "__main__":
    main(int(sys.argv[1]))
