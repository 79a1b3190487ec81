"""A histogram of latencies: small, mergeable, and exact to about one percent from a nanosecond to hours.

It is finer than the broker's own histogram, which must be cheap for every batch: a bench compares runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

# Buckets grow by this factor, so the error of a value is at most half of it.
_GROWTH: Final = 1.02
_BUCKETS: Final = 1536  # up to about five hours
_SCALE: Final = 1 / math.log(_GROWTH)


class Latencies:
    """Counts latencies in buckets. A latency below one nanosecond (the clocks of two machines differ) counts as one."""

    def __init__(self, counts: Iterable[int] = ()) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        given = np.fromiter(counts, np.int64)
        self._counts[: len(given)] = given

    def add(self, latencies_ns: npt.ArrayLike) -> None:
        values = np.maximum(np.asarray(latencies_ns, np.float64), 1.0)
        buckets = np.minimum((np.log(values) * _SCALE).astype(np.int64), _BUCKETS - 1)
        self._counts += np.bincount(buckets, minlength=_BUCKETS)

    def merge(self, other: Latencies) -> None:
        self._counts += other._counts

    @property
    def count(self) -> int:
        return int(self._counts.sum())

    @property
    def counts(self) -> list[int]:
        """The counts without the empty end, from which another process makes the same histogram."""
        filled = np.flatnonzero(self._counts)
        return self._counts[: filled[-1] + 1].tolist() if len(filled) else []

    def percentile_ns(self, percent: float) -> int | None:
        """The latency that `percent` of all latencies do not exceed; None if there are none."""
        if not self.count:
            return None
        rank = max(math.ceil(self.count * percent / 100), 1)
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        return round(math.exp((bucket + 0.5) / _SCALE))
