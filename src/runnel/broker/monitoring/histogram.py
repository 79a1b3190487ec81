"""Histograms of durations: counts in fixed logarithmic buckets, cheap to fill, summed up only when read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from operator import sub
from typing import Final

import msgspec

# A bucket is named by the position of a number's highest bit and the three bits behind it:
#
#     0 … 15        a bucket each
#     16 … 31       8 buckets of 2
#     32 … 63       8 buckets of 4, and so on up to 2**63
#
# so that a bucket is never wider than an eighth of the values in it.
_SUB_BITS: Final = 3
_VALUE_MAX: Final = 2**63 - 1
_BUCKETS: Final = (63 - _SUB_BITS - 1) * 2**_SUB_BITS + 2 ** (_SUB_BITS + 1)


def bucket_of(value: int) -> int:
    """The bucket of a number from 0 to 2**63 - 1."""
    shift = value.bit_length() - _SUB_BITS - 1
    return (shift << _SUB_BITS) + (value >> shift) if shift > 0 else value


def bucket_end(bucket: int) -> int:
    """The highest number that falls into a bucket."""
    shift = (bucket >> _SUB_BITS) - 1
    return bucket if shift <= 0 else ((bucket - (shift << _SUB_BITS) + 1) << shift) - 1


class HistogramSnapshot(msgspec.Struct, frozen=True):
    """The counts of a histogram, in total or in one interval."""

    counts: Sequence[int]  # by bucket
    sum_ns: int
    max_ns: int

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_ns(self, share: float) -> int:
        """The time that this share of the durations did not exceed, rounded up to a bucket's end; 0 if none."""
        return self.quantiles_ns((share,))[0]

    def quantiles_ns(self, shares: Sequence[float]) -> list[int]:
        """Several quantiles, in rising order. One pass: the broker computes them every second on the loop."""
        total, seen = self.count, 0
        found: list[int] = []
        for end_ns, count in self.buckets():
            seen += count
            while len(found) < len(shares) and seen >= max(1.0, shares[len(found)] * total):
                found.append(min(end_ns, self.max_ns))
        return found + [self.max_ns] * (len(shares) - len(found))

    def buckets(self) -> Iterator[tuple[int, int]]:
        """The highest time of each bucket that is not empty, and its count."""
        for bucket in compress(range(len(self.counts)), self.counts):
            yield bucket_end(bucket), self.counts[bucket]

    def counts_up_to(self, bounds_ns: Sequence[int]) -> list[int]:
        """How many durations did not exceed each rising bound. A bucket that contains a bound counts as beyond it.

        So a time that is less than an eighth below a bound may count as beyond it, and always does so.
        """
        counts: list[int] = []
        filled = self.buckets()
        seen, bucket = 0, next(filled, None)
        for bound_ns in bounds_ns:
            while bucket is not None and bucket[0] <= bound_ns:
                seen += bucket[1]
                bucket = next(filled, None)
            counts.append(seen)
        return counts

    def summary(self) -> dict[str, int]:
        """The figures that the metrics documents give."""
        count = self.count
        p50_ns, p99_ns, p99_9_ns = self.quantiles_ns((0.5, 0.99, 0.999))
        return {
            "count": count,
            "mean_ns": self.sum_ns // count if count else 0,
            "p50_ns": p50_ns,
            "p99_ns": p99_ns,
            "p99_9_ns": p99_9_ns,
            "max_ns": self.max_ns,
        }


class TimeHistogram:
    """Counts durations. Any code may `observe`; only one reader may end intervals."""

    __slots__ = ("_before", "_before_sum_ns", "_counts", "_interval_max_ns", "_max_ns", "_sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._sum_ns = 0
        self._max_ns = 0  # without the current interval
        self._interval_max_ns = 0
        self._before = list(self._counts)  # the counts at the end of the last interval
        self._before_sum_ns = 0

    def observe(self, ns: int, times: int = 1) -> None:
        """Count a duration, `times` times. A negative one, which only a stepping wall clock gives, counts as 0."""
        if not 0 <= ns <= _VALUE_MAX:
            ns = 0 if ns < 0 else _VALUE_MAX
        # bucket_of, written out: a call would double the cost.
        shift = ns.bit_length() - 4
        self._counts[(shift << 3) + (ns >> shift) if shift > 0 else ns] += times
        self._sum_ns += ns * times
        if ns > self._interval_max_ns:
            self._interval_max_ns = ns

    def total(self) -> HistogramSnapshot:
        """All durations so far."""
        max_ns = max(self._max_ns, self._interval_max_ns)
        return HistogramSnapshot(tuple(self._counts), self._sum_ns, max_ns)

    def end_interval(self) -> HistogramSnapshot:
        """The durations since the last call."""
        counts = tuple(map(sub, self._counts, self._before))
        ended = HistogramSnapshot(counts, self._sum_ns - self._before_sum_ns, self._interval_max_ns)
        self._before = list(self._counts)
        self._before_sum_ns = self._sum_ns
        self._max_ns = max(self._max_ns, self._interval_max_ns)
        self._interval_max_ns = 0
        return ended
