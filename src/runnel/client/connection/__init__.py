"""Connections of a client: an address becomes a link, which connects again after a loss. Read `link.py` first."""

from runnel.client.connection.addresses import (
    dial_to,
    parse_host,
    parse_url,
    parse_urls,
    token_from_environment,
)
from runnel.client.connection.connection import BrokerConnection, OnAnswer, PartReceiver
from runnel.client.connection.link import (
    ConnectionWatch,
    Dial,
    DialTarget,
    Identity,
    Link,
    UnreachableError,
    backoff_s,
)
from runnel.client.connection.pattern_hints import warn_of_habits
from runnel.client.connection.routing import Router
from runnel.client.connection.timers import (
    Deadline,
    Handle,
    LoopTimers,
    Timers,
    Usual,
    sleep,
)

__all__ = [
    "BrokerConnection",
    "ConnectionWatch",
    "Deadline",
    "Dial",
    "DialTarget",
    "Handle",
    "Identity",
    "Link",
    "LoopTimers",
    "OnAnswer",
    "PartReceiver",
    "Router",
    "Timers",
    "UnreachableError",
    "Usual",
    "backoff_s",
    "dial_to",
    "parse_host",
    "parse_url",
    "parse_urls",
    "sleep",
    "token_from_environment",
    "warn_of_habits",
]
