"""Who may look at the cluster and change who serves what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from runnel.broker.access import Access
from runnel.errors import ClientFault, ForbiddenError
from runnel.log.log import ShardId
from runnel.security.rights import Grant, Rights
from tests.broker.scenes import At, scene

VERBS: dict[str, Callable[[Access], Awaitable[object]]] = {
    "cluster": lambda access: access.cluster(),
    "move_shard": lambda access: access.move_shard(ShardId("main", 0), "node-1"),
    "drain_node": lambda access: access.drain_node("node-1", is_draining=True),
    "balance_cluster": lambda access: access.balance_cluster(),
}


def access_with(at: At, *grants: str) -> Access:
    return Access(at.broker, Rights("someone", [Grant.parse(grant) for grant in grants]))


@scene(patterns=tuple(VERBS))
async def test_the_cluster_needs_the_right_to_administer_everything(at: At) -> None:
    act = VERBS[at.pattern]
    for grants in (("admin:sensors/*",), ("publish:*", "read:*", "consume:*", "read:!*"), ()):
        with pytest.raises(ForbiddenError):
            await act(access_with(at, *grants))
    with pytest.raises(ClientFault, match="no cluster"):
        await act(access_with(at, "admin:*"))
