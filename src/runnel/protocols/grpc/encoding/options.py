"""Translates starts, modes and options of subscriptions between the .proto and the broker."""

from __future__ import annotations

from typing import Final

from runnel.errors import ClientFault
from runnel.formats.wire import PartitionPlace, Start
from runnel.formats.work_heads import WorkOptions
from runnel.protocols.grpc.encoding.messages import natural
from runnel.protocols.grpc.generated import runnel_pb2 as pb

_KINDS: Final = {
    pb.Start.KIND_LATEST: "latest",
    pb.Start.KIND_LAST: "last",
    pb.Start.KIND_EARLIEST: "earliest",
    pb.Start.KIND_OFFSETS: "offsets",
    pb.Start.KIND_TIME: "time",
}
_MODES: Final = {
    pb.MODE_UNSPECIFIED: "",
    pb.MODE_SHARED: "shared",
    pb.MODE_KEY_SHARED: "key_shared",
    pb.MODE_MULTICAST: "multicast",
}
_PROTO_MODES: Final = {text: mode for mode, text in _MODES.items()}
_OVERFLOWS: Final = {
    pb.SubscribeRequest.OVERFLOW_UNSPECIFIED: "drop_oldest",
    pb.SubscribeRequest.OVERFLOW_DROP_OLDEST: "drop_oldest",
    pb.SubscribeRequest.OVERFLOW_NEWEST_PER_TOPIC: "newest_per_topic",
    pb.SubscribeRequest.OVERFLOW_DISCONNECT: "disconnect",
}
_NUMBERS: Final = (
    "lease_ms",
    "processing_ms_max",
    "deliveries_max",
    "retry_delay_ms",
    "retry_delay_ms_max",
    "absent_ms_max",
)


def start_of(start: pb.Start) -> Start | None:
    """The start; None if the request has none."""
    if start.kind == pb.Start.KIND_UNSPECIFIED:
        if start.partitions or start.time_ns:
            raise ClientFault("start: a place or a time needs a kind, KIND_OFFSETS or KIND_TIME")
        return None
    if start.kind not in _KINDS:
        raise ClientFault(f"start.kind {start.kind} is unknown; 0 to 5 are defined")
    places = tuple(
        PartitionPlace(place.topic, place.partition, natural("offset", place.offset))
        for place in start.partitions
    )
    return Start(_KINDS[start.kind], places, start.time_ns)


def mode_of(mode: pb.Mode) -> str:
    if mode not in _MODES:
        raise ClientFault(f"mode {mode} is unknown; 0 to 3 are defined")
    return _MODES[mode]


def proto_mode(mode: str) -> pb.Mode:
    return _PROTO_MODES[mode]


def overflow_of(overflow: pb.SubscribeRequest.Overflow) -> str:
    if overflow not in _OVERFLOWS:
        raise ClientFault(f"overflow {overflow} is unknown; 0 to 3 are defined")
    return _OVERFLOWS[overflow]


def options_of(options: pb.WorkOptions) -> WorkOptions:
    """The options. None stands for the broker's default."""
    numbers = {
        name: natural(f"options.{name}", getattr(options, name))
        for name in _NUMBERS
        if options.HasField(name)
    }
    return WorkOptions(**numbers, backoff=options.backoff if options.HasField("backoff") else None)


def proto_options(options: WorkOptions) -> pb.WorkOptions:
    return pb.WorkOptions(
        lease_ms=options.lease_ms,
        processing_ms_max=options.processing_ms_max,
        deliveries_max=options.deliveries_max,
        retry_delay_ms=options.retry_delay_ms,
        retry_delay_ms_max=options.retry_delay_ms_max,
        backoff=options.backoff,
        absent_ms_max=options.absent_ms_max,
    )
