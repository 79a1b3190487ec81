"""Names in paths."""

from __future__ import annotations

import pytest

from runnel.errors import InvalidNameError
from runnel.protocols.http.server.paths import decoded_name, routed_path


@pytest.mark.parametrize(
    ("raw", "routed"),
    [
        ("/healthz", "/healthz"),
        ("/v1/topics", "/v1/topics"),
        ("/v1/topics/", "/v1/topics/"),
        ("/v1/topics/a", "/v1/topics/a"),
        ("/v1/topics/a/", "/v1/topics/a%2F"),
        ("/v1/topics/a/b", "/v1/topics/a%2Fb"),
        ("/v1/topics/a%2fb", "/v1/topics/a%2fb"),
        ("/v1/topics/a/messages", "/v1/topics/a/messages"),
        ("/v1/topics/a/b/messages", "/v1/topics/a%2Fb/messages"),
        ("/v1/topics/a//b/messages", "/v1/topics/a%2F%2Fb/messages"),
        ("/v1/topics//a/messages", "/v1/topics/%2Fa/messages"),
        ("/v1/topics/a/messages/17", "/v1/topics/a/messages/17"),
        ("/v1/topics/a/b/messages/17", "/v1/topics/a%2Fb/messages/17"),
        ("/v1/topics/a/messages/b", "/v1/topics/a%2Fmessages%2Fb"),
        ("/v1/topics/a%2Fmessages", "/v1/topics/a%2Fmessages"),
        ("/v1/topics/messages", "/v1/topics/messages"),
        ("/v1/topics/messages/messages", "/v1/topics/messages/messages"),
        ("/v1/topics/../../etc/passwd", "/v1/topics/..%2F..%2Fetc%2Fpasswd"),
        ("/v1/cursors/a/b", "/v1/cursors/a%2Fb"),
        ("/v1/cursors/a/messages", "/v1/cursors/a%2Fmessages"),
        ("/v1/subscriptions/a%2Fb/messages", "/v1/subscriptions/a%2Fb/messages"),
    ],
)
def test_every_name_is_one_segment_for_routing(raw: str, routed: str) -> None:
    assert routed_path(raw.encode()) == routed


@pytest.mark.parametrize(
    "raw",
    [
        "/v1/topics//messages",
        "/v1/topics//messages/1",
        "/v1/subscriptions//messages",
        "/v1/subscriptions/a/consumers//",
        "//healthz",
    ],
)
def test_a_name_that_is_empty_is_never_taken_for_another(raw: str) -> None:
    with pytest.raises(InvalidNameError, match="empty"):
        routed_path(raw.encode())


@pytest.mark.parametrize(
    ("escaped", "name"),
    [
        ("a", "a"),
        ("a%2Fb", "a/b"),
        ("%C3%BC", "ü"),
        ("100%25", "100%"),
        ("a+b", "a+b"),
        ("a%zz", "a%zz"),
    ],
)
def test_names_are_decoded(escaped: str, name: str) -> None:
    assert decoded_name("topic", escaped) == name


@pytest.mark.parametrize("escaped", ["%ff", "%00", "a%0Ab", "%ED%A0%80", "%E2%80%A8", "x" * 256])
def test_names_that_are_not_allowed_are_refused(escaped: str) -> None:
    with pytest.raises(InvalidNameError):
        decoded_name("topic", escaped)
