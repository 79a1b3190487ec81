"""Who may have a checkpoint made."""

from __future__ import annotations

import pytest

from runnel.broker.access import Access
from runnel.errors import ClientFault, ForbiddenError
from runnel.security.rights import Grant, Rights
from tests.broker.scenes import At, Store, scene


def access_with(at: At, *grants: str) -> Access:
    return Access(at.broker, Rights("someone", [Grant.parse(grant) for grant in grants]))


@scene()
async def test_checkpoint_needs_the_right_to_administer_everything(at: At) -> None:
    if at.store is not Store.MEMORY:
        return  # its files are no real ones
    for grants in (("admin:sensors/*",), ("publish:*", "read:*", "consume:*", "read:!*"), ()):
        with pytest.raises(ForbiddenError):
            await access_with(at, *grants).checkpoint()
    with pytest.raises(ClientFault, match="keeps everything in memory"):
        await access_with(at, "admin:*").checkpoint()
