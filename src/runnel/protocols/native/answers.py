"""Answers and notices for publishes and errors. Only this module maps errors to the native protocol."""

from __future__ import annotations

from typing import Final

from runnel.broker.broker import Published
from runnel.errors import MovedError, RunnelError, details_of
from runnel.formats import wire
from runnel.formats.work_heads import ConsumerEnded

# Some errors quote the refused text, which may be as long as a frame.
_TEXT_CHARACTERS_MAX: Final = 1000

INTERNAL_TEXT: Final = "an internal error of the broker; its diagnostics say more"


def published_answer(request_id: int, published: Published) -> wire.Published:
    return wire.Published(
        request_id,
        published.base_offsets,
        published.entry,
        published.epoch,
        published.receive_time_ns,
        published.level,
        published.is_repeated,
        published.receivers,
    )


def error_answer(request_id: int, error: BaseException) -> wire.Error:
    """The answer to a request that failed; id 0 stands for the connection itself.

    Any other error than a RunnelError is a bug of ours, and the client does not get its text.
    """
    if not isinstance(error, RunnelError):
        return wire.Error(request_id, RunnelError.code, INTERNAL_TEXT, RunnelError.retriable)
    return wire.Error(
        request_id,
        error.code,
        shortened(str(error)),
        error.retriable,
        {key: _short(value) for key, value in details_of(error).items()},
        _routes_of(error),
    )


def ended_notice(subscription: int, error: RunnelError) -> wire.Ended:
    """The notice that a subscription ended, and why."""
    return wire.Ended(
        subscription, error.code, shortened(str(error)), error.retriable, _routes_of(error)
    )


def consumer_ended_notice(consumer: int, error: RunnelError) -> ConsumerEnded:
    """The notice that a consumer ended, and why."""
    return ConsumerEnded(consumer, error.code, shortened(str(error)), error.retriable)


def shortened(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[: _TEXT_CHARACTERS_MAX - 1] + "…"


def _short(value: str | int) -> str | int:
    return shortened(value) if isinstance(value, str) else value


def _routes_of(error: RunnelError) -> list[wire.Route]:
    routes = error.routes if isinstance(error, MovedError) else ()
    return [route for route in routes if isinstance(route, wire.Route)]
