"""The audit trail, read through every listener: each denial and each change, with the token of the client."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import msgspec
import pytest

from runnel.client import Bus
from runnel.errors import ForbiddenError
from tests.protocols.guarded import EVERYTHING, LISTENERS, Guarded, run_guarded
from tests.protocols.test_rights import set_the_scene


class Auditor:
    """A reader of `!system/audit`."""

    def __init__(self, subscription: Any) -> None:
        self._subscription = subscription

    async def next(self, kind: str) -> dict[str, Any]:
        while True:
            document = msgspec.json.decode((await anext(self._subscription)).payload)
            if document["kind"] == kind:
                return document  # type: ignore[no-any-return]


@pytest.mark.parametrize("listener", LISTENERS)
def test_what_is_denied_and_what_is_changed_names_the_token(listener: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        await set_the_scene(root)
        async with root.subscribe("!system/audit") as subscription:
            trail = Auditor(subscription)
            await root.ping()
            token = guarded.token("admin:open/*", "read:open/*", name="keeper")
            assert (await trail.next("token_added"))["subject"] == "keeper"
            async with guarded.connecting(listener, token) as bus:
                await denied(bus, trail)
                await changed(bus, trail)
            guarded.revoke(token)
            assert (await trail.next("token_revoked"))["subject"] == "keeper"

    run_guarded(scenario, listener)


async def denied(bus: Bus, trail: Auditor) -> None:
    with pytest.raises(ForbiddenError):
        await bus.publish("open/a", b"1")
    document = await trail.next("denied")
    assert document["token"] == "keeper"
    assert document["subject"] in ("publish", "send", "routes")
    assert "open/a" in document["problem"]
    assert document["peer"]
    for verb, ask in (
        ("fetch", partial(bus.fetch, "closed/a", offset=1)),
        ("delete_topic", partial(bus.delete_topic, "closed/a")),
        ("delete_subscription", partial(bus.delete_subscription, "theirs")),
        ("remove_cursor", partial(bus.remove_cursor, "theirs")),
        ("settle_dead", partial(bus.drop_dead, "theirs", "all")),
    ):
        with pytest.raises(ForbiddenError):
            await ask()
        document = await trail.next("denied")
        assert (document["subject"], document["token"]) == (verb, "keeper")


async def changed(bus: Bus, trail: Auditor) -> None:
    for kind, subject, ask in (
        ("cursor_removed", "spare", partial(bus.remove_cursor, "spare")),
        ("subscription_moved", "mine", partial(bus.move_subscription, "mine", "earliest")),
        ("subscription_paused", "mine", partial(bus.pause_subscription, "mine")),
        ("member_removed", "many", partial(bus.remove_member, "many", "m")),
        ("dead_letters_redriven", "mine", partial(bus.redrive, "mine", "all")),
        ("subscription_deleted", "mine", partial(bus.delete_subscription, "mine")),
        ("topic_purged", "open/a", partial(bus.purge_topic, "open/a")),
        ("topic_deleted", "open/a", partial(bus.delete_topic, "open/a")),
    ):
        await ask()
        document = await trail.next(kind)
        assert (document["subject"], document["token"]) == (subject, "keeper")
    await bus.set_cursor("c", {"open/b": 2})
    await bus.set_cursor("c", {"open/b": 1})
    assert (await trail.next("cursor_moved"))["subject"] == "c"


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_settling_what_another_token_was_given_is_denied_and_recorded(verb: str) -> None:
    async def scenario(guarded: Guarded) -> None:
        root = await guarded.client("native", *EVERYTHING)
        await root.make_subscription("work", "a")
        await root.publish("a", b"1")
        taker, thief = (guarded.token("consume:a", name=name) for name in ("taker", "thief"))
        path = f"http://{guarded.addresses['http']}/v1/subscriptions/work"
        async with httpx.AsyncClient() as http, root.subscribe("!system/audit") as subscription:
            trail = Auditor(subscription)
            taken = await http.post(f"{path}/messages", headers=bearer(taker))
            [message] = taken.json()["messages"]
            named = {"acks": [message["ack"]]}
            answer = await http.post(f"{path}/{verb}", headers=bearer(thief), json=named)
            assert answer.status_code == 403
            document = await trail.next("denied")
            assert (document["subject"], document["token"]) == (verb, "thief")

    run_guarded(scenario, "http")


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}
