"""How far ahead a segment's file is allocated."""

from __future__ import annotations

import pytest

from runnel.log.disk.group_writer import _step

KIB = 1024
MIB = 1024 * KIB


@pytest.mark.parametrize(
    ("end", "step_max", "step"),
    [
        (65, 16 * MIB, 64 * KIB),
        (64 * KIB, 16 * MIB, 64 * KIB),
        (64 * KIB + 1, 16 * MIB, 128 * KIB),
        (MIB + 1, 16 * MIB, 2 * MIB),
        (200 * MIB, 16 * MIB, 16 * MIB),
        (65, 4096, 4096),
        (65, 0, 0),
    ],
)
def test_room_is_made_ahead_as_a_segment_grows_up_to_the_setting(
    end: int, step_max: int, step: int
) -> None:
    assert _step(end, step_max) == step
