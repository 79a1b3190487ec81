"""The metrics of a node as the tail of `metrics_report`: families with their samples, in msgpack.

Names, units and kinds follow Prometheus' conventions. Samples carry no name of a node: the head has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from runnel.errors import MalformedError

MetricRow: TypeAlias = tuple[Sequence[str], float]  # the values of the labels, and the value


class ExposedMetric(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A family of samples of one name. A histogram has no labels, and buckets instead of rows."""

    name: str  # without the suffixes of its kind, such as _total and _bucket
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Sequence[str] = ()
    rows: Sequence[MetricRow] = ()
    buckets: Sequence[tuple[str, float]] = ()  # upper bounds, the last +Inf; counts up to them
    sum: float = 0.0  # of a histogram


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Sequence[ExposedMetric]] = msgspec.msgpack.Decoder(
    Sequence[ExposedMetric]
)


def encode_metrics(metrics: Sequence[ExposedMetric]) -> bytes:
    """The tail of a `metrics_report`."""
    return _encoder.encode(metrics)


def decode_metrics(tail: bytes | memoryview) -> Sequence[ExposedMetric]:
    """The metrics in the tail of a `metrics_report`."""
    try:
        return _decoder.decode(tail)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError("metrics report", str(error)) from None
