"""A short seeded round of the fuzzing that bin/soak does at length."""

from __future__ import annotations

import random

import pytest

from tests.fuzz import formats


@pytest.mark.parametrize("seed", [1, 2])
def test_no_mutated_bytes_bring_out_another_error(seed: int) -> None:
    assert formats.run(1.0, seed) > len(formats.seeds())


def test_a_seed_always_makes_the_same_inputs() -> None:
    first, second = (random.Random(5) for _ in range(2))
    data, other = formats.seeds()[:2]
    for _ in range(100):
        assert formats.mutate(first, data, other) == formats.mutate(second, data, other)
