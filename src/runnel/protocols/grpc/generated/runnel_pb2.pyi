from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Format(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORMAT_UNSPECIFIED: _ClassVar[Format]
    FORMAT_MESSAGES: _ClassVar[Format]
    FORMAT_BLOCKS: _ClassVar[Format]

class Level(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEVEL_UNSPECIFIED: _ClassVar[Level]
    LEVEL_NONE: _ClassVar[Level]
    LEVEL_RECEIVED: _ClassVar[Level]
    LEVEL_STORED: _ClassVar[Level]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_SHARED: _ClassVar[Mode]
    MODE_KEY_SHARED: _ClassVar[Mode]
    MODE_MULTICAST: _ClassVar[Mode]
FORMAT_UNSPECIFIED: Format
FORMAT_MESSAGES: Format
FORMAT_BLOCKS: Format
LEVEL_UNSPECIFIED: Level
LEVEL_NONE: Level
LEVEL_RECEIVED: Level
LEVEL_STORED: Level
MODE_UNSPECIFIED: Mode
MODE_SHARED: Mode
MODE_KEY_SHARED: Mode
MODE_MULTICAST: Mode

class Message(_message.Message):
    __slots__ = ("topic", "payload", "key", "partition_key", "partition", "tags", "event_time_ns", "transmit_time_ns", "uid", "receive_time_ns", "offset")
    class TagsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_KEY_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    TRANSMIT_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    payload: bytes
    key: bytes
    partition_key: bytes
    partition: int
    tags: _containers.ScalarMap[str, str]
    event_time_ns: int
    transmit_time_ns: int
    uid: bytes
    receive_time_ns: int
    offset: int
    def __init__(self, topic: _Optional[str] = ..., payload: _Optional[bytes] = ..., key: _Optional[bytes] = ..., partition_key: _Optional[bytes] = ..., partition: _Optional[int] = ..., tags: _Optional[_Mapping[str, str]] = ..., event_time_ns: _Optional[int] = ..., transmit_time_ns: _Optional[int] = ..., uid: _Optional[bytes] = ..., receive_time_ns: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "text", "retriable", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRIABLE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: str
    text: str
    retriable: bool
    details: str
    def __init__(self, code: _Optional[str] = ..., text: _Optional[str] = ..., retriable: _Optional[bool] = ..., details: _Optional[str] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("reason", "missed", "topic", "partition", "first_offset", "next_offset", "text")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    missed: int
    topic: str
    partition: int
    first_offset: int
    next_offset: int
    text: str
    def __init__(self, reason: _Optional[str] = ..., missed: _Optional[int] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., first_offset: _Optional[int] = ..., next_offset: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("text", "within_ms")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WITHIN_MS_FIELD_NUMBER: _ClassVar[int]
    text: str
    within_ms: int
    def __init__(self, text: _Optional[str] = ..., within_ms: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("id", "level", "messages", "topic", "batch")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    id: int
    level: Level
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    topic: str
    batch: bytes
    def __init__(self, id: _Optional[int] = ..., level: _Optional[_Union[Level, str]] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., topic: _Optional[str] = ..., batch: _Optional[bytes] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("id", "level", "offsets", "partitions", "receive_time_ns", "entry", "epoch", "is_repeated", "receivers", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_REPEATED_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: int
    level: Level
    offsets: _containers.RepeatedScalarFieldContainer[int]
    partitions: _containers.RepeatedScalarFieldContainer[int]
    receive_time_ns: int
    entry: int
    epoch: int
    is_repeated: bool
    receivers: int
    error: Error
    def __init__(self, id: _Optional[int] = ..., level: _Optional[_Union[Level, str]] = ..., offsets: _Optional[_Iterable[int]] = ..., partitions: _Optional[_Iterable[int]] = ..., receive_time_ns: _Optional[int] = ..., entry: _Optional[int] = ..., epoch: _Optional[int] = ..., is_repeated: _Optional[bool] = ..., receivers: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class PublishStreamResponse(_message.Message):
    __slots__ = ("answers", "closing")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[PublishResponse]
    closing: Closing
    def __init__(self, answers: _Optional[_Iterable[_Union[PublishResponse, _Mapping]]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ...) -> None: ...

class NewTermRequest(_message.Message):
    __slots__ = ("producer",)
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    producer: str
    def __init__(self, producer: _Optional[str] = ...) -> None: ...

class NewTermResponse(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("topic", "partition", "offset", "time_ns", "messages_max", "bytes_max", "wait_ms", "format")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    time_ns: int
    messages_max: int
    bytes_max: int
    wait_ms: int
    format: Format
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., time_ns: _Optional[int] = ..., messages_max: _Optional[int] = ..., bytes_max: _Optional[int] = ..., wait_ms: _Optional[int] = ..., format: _Optional[_Union[Format, str]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("messages", "blocks", "next_offset", "first_offset", "end_offset", "gaps")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    END_OFFSET_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    next_offset: int
    first_offset: int
    end_offset: int
    gaps: _containers.RepeatedCompositeFieldContainer[Gap]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., blocks: _Optional[_Iterable[bytes]] = ..., next_offset: _Optional[int] = ..., first_offset: _Optional[int] = ..., end_offset: _Optional[int] = ..., gaps: _Optional[_Iterable[_Union[Gap, _Mapping]]] = ...) -> None: ...

class PartitionPlace(_message.Message):
    __slots__ = ("topic", "partition", "offset")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("kind", "partitions", "time_ns")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Start.Kind]
        KIND_LATEST: _ClassVar[Start.Kind]
        KIND_LAST: _ClassVar[Start.Kind]
        KIND_EARLIEST: _ClassVar[Start.Kind]
        KIND_OFFSETS: _ClassVar[Start.Kind]
        KIND_TIME: _ClassVar[Start.Kind]
    KIND_UNSPECIFIED: Start.Kind
    KIND_LATEST: Start.Kind
    KIND_LAST: Start.Kind
    KIND_EARLIEST: Start.Kind
    KIND_OFFSETS: Start.Kind
    KIND_TIME: Start.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    kind: Start.Kind
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionPlace]
    time_ns: int
    def __init__(self, kind: _Optional[_Union[Start.Kind, str]] = ..., partitions: _Optional[_Iterable[_Union[PartitionPlace, _Mapping]]] = ..., time_ns: _Optional[int] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("patterns", "start", "position", "overflow", "format")
    class Overflow(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OVERFLOW_UNSPECIFIED: _ClassVar[SubscribeRequest.Overflow]
        OVERFLOW_DROP_OLDEST: _ClassVar[SubscribeRequest.Overflow]
        OVERFLOW_NEWEST_PER_TOPIC: _ClassVar[SubscribeRequest.Overflow]
        OVERFLOW_DISCONNECT: _ClassVar[SubscribeRequest.Overflow]
    OVERFLOW_UNSPECIFIED: SubscribeRequest.Overflow
    OVERFLOW_DROP_OLDEST: SubscribeRequest.Overflow
    OVERFLOW_NEWEST_PER_TOPIC: SubscribeRequest.Overflow
    OVERFLOW_DISCONNECT: SubscribeRequest.Overflow
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    patterns: _containers.RepeatedScalarFieldContainer[str]
    start: Start
    position: bytes
    overflow: SubscribeRequest.Overflow
    format: Format
    def __init__(self, patterns: _Optional[_Iterable[str]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., position: _Optional[bytes] = ..., overflow: _Optional[_Union[SubscribeRequest.Overflow, str]] = ..., format: _Optional[_Union[Format, str]] = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("subscribed", "delivery", "gap", "caught_up", "closing", "position")
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    CAUGHT_UP_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    subscribed: Subscribed
    delivery: Delivery
    gap: Gap
    caught_up: CaughtUp
    closing: Closing
    position: bytes
    def __init__(self, subscribed: _Optional[_Union[Subscribed, _Mapping]] = ..., delivery: _Optional[_Union[Delivery, _Mapping]] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., caught_up: _Optional[_Union[CaughtUp, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ..., position: _Optional[bytes] = ...) -> None: ...

class Subscribed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CaughtUp(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("messages", "blocks")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., blocks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ListShardsRequest(_message.Message):
    __slots__ = ("patterns", "time_ns")
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    patterns: _containers.RepeatedScalarFieldContainer[str]
    time_ns: int
    def __init__(self, patterns: _Optional[_Iterable[str]] = ..., time_ns: _Optional[int] = ...) -> None: ...

class ListShardsResponse(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    def __init__(self, shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("journal", "shard", "epoch", "first_entry", "next_entry", "time_entry", "address")
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    NEXT_ENTRY_FIELD_NUMBER: _ClassVar[int]
    TIME_ENTRY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    journal: str
    shard: int
    epoch: int
    first_entry: int
    next_entry: int
    time_entry: int
    address: str
    def __init__(self, journal: _Optional[str] = ..., shard: _Optional[int] = ..., epoch: _Optional[int] = ..., first_entry: _Optional[int] = ..., next_entry: _Optional[int] = ..., time_entry: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class FetchShardRequest(_message.Message):
    __slots__ = ("journal", "shard", "entry", "end_entry", "patterns", "epoch", "bytes_max")
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    END_ENTRY_FIELD_NUMBER: _ClassVar[int]
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    journal: str
    shard: int
    entry: int
    end_entry: int
    patterns: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    bytes_max: int
    def __init__(self, journal: _Optional[str] = ..., shard: _Optional[int] = ..., entry: _Optional[int] = ..., end_entry: _Optional[int] = ..., patterns: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ..., bytes_max: _Optional[int] = ...) -> None: ...

class FetchShardResponse(_message.Message):
    __slots__ = ("blocks", "messages", "epoch", "next_entry", "first_entry", "end_entry", "gaps")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_ENTRY_FIELD_NUMBER: _ClassVar[int]
    FIRST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    END_ENTRY_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    messages: int
    epoch: int
    next_entry: int
    first_entry: int
    end_entry: int
    gaps: _containers.RepeatedCompositeFieldContainer[Gap]
    def __init__(self, blocks: _Optional[_Iterable[bytes]] = ..., messages: _Optional[int] = ..., epoch: _Optional[int] = ..., next_entry: _Optional[int] = ..., first_entry: _Optional[int] = ..., end_entry: _Optional[int] = ..., gaps: _Optional[_Iterable[_Union[Gap, _Mapping]]] = ...) -> None: ...

class WorkOptions(_message.Message):
    __slots__ = ("lease_ms", "processing_ms_max", "deliveries_max", "retry_delay_ms", "retry_delay_ms_max", "backoff", "absent_ms_max")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PROCESSING_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_MAX_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_FIELD_NUMBER: _ClassVar[int]
    ABSENT_MS_MAX_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    processing_ms_max: int
    deliveries_max: int
    retry_delay_ms: int
    retry_delay_ms_max: int
    backoff: float
    absent_ms_max: int
    def __init__(self, lease_ms: _Optional[int] = ..., processing_ms_max: _Optional[int] = ..., deliveries_max: _Optional[int] = ..., retry_delay_ms: _Optional[int] = ..., retry_delay_ms_max: _Optional[int] = ..., backoff: _Optional[float] = ..., absent_ms_max: _Optional[int] = ...) -> None: ...

class ConsumeRequest(_message.Message):
    __slots__ = ("open", "window", "ack", "ack_up_to", "nack", "extend", "recalled", "leave")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    ACK_UP_TO_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    RECALLED_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    open: ConsumeOpen
    window: Window
    ack: Ack
    ack_up_to: AckUpTo
    nack: Nack
    extend: Extend
    recalled: Recalled
    leave: Leave
    def __init__(self, open: _Optional[_Union[ConsumeOpen, _Mapping]] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., ack_up_to: _Optional[_Union[AckUpTo, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., extend: _Optional[_Union[Extend, _Mapping]] = ..., recalled: _Optional[_Union[Recalled, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ...) -> None: ...

class ConsumeResponse(_message.Message):
    __slots__ = ("consuming", "work", "recall", "late", "acked", "closing")
    CONSUMING_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    ACKED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    consuming: Consuming
    work: Work
    recall: Recall
    late: Late
    acked: Acked
    closing: Closing
    def __init__(self, consuming: _Optional[_Union[Consuming, _Mapping]] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ..., late: _Optional[_Union[Late, _Mapping]] = ..., acked: _Optional[_Union[Acked, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ...) -> None: ...

class ConsumeOpen(_message.Message):
    __slots__ = ("subscription", "patterns", "mode", "window", "member", "start", "options", "format")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    patterns: _containers.RepeatedScalarFieldContainer[str]
    mode: Mode
    window: Window
    member: str
    start: Start
    options: WorkOptions
    format: Format
    def __init__(self, subscription: _Optional[str] = ..., patterns: _Optional[_Iterable[str]] = ..., mode: _Optional[_Union[Mode, str]] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., member: _Optional[str] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., options: _Optional[_Union[WorkOptions, _Mapping]] = ..., format: _Optional[_Union[Format, str]] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("messages", "bytes")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    messages: int
    bytes: int
    def __init__(self, messages: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Consuming(_message.Message):
    __slots__ = ("subscription", "mode", "patterns", "options", "member")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    mode: Mode
    patterns: _containers.RepeatedScalarFieldContainer[str]
    options: WorkOptions
    member: str
    def __init__(self, subscription: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., patterns: _Optional[_Iterable[str]] = ..., options: _Optional[_Union[WorkOptions, _Mapping]] = ..., member: _Optional[str] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("delivery", "topic", "partition", "begin", "end", "messages", "block", "attempts")
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    delivery: int
    topic: str
    partition: int
    begin: int
    end: int
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    block: bytes
    attempts: _containers.RepeatedCompositeFieldContainer[Attempt]
    def __init__(self, delivery: _Optional[int] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., block: _Optional[bytes] = ..., attempts: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("offset", "failures", "first_delivery_ns")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    FIRST_DELIVERY_NS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    failures: int
    first_delivery_ns: int
    def __init__(self, offset: _Optional[int] = ..., failures: _Optional[int] = ..., first_delivery_ns: _Optional[int] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("delivery", "begin", "end")
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    delivery: int
    begin: int
    end: int
    def __init__(self, delivery: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Picked(_message.Message):
    __slots__ = ("delivery", "offsets")
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    delivery: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, delivery: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("id", "deliveries", "parts", "picked")
    ID_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PICKED_FIELD_NUMBER: _ClassVar[int]
    id: int
    deliveries: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    picked: _containers.RepeatedCompositeFieldContainer[Picked]
    def __init__(self, id: _Optional[int] = ..., deliveries: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., picked: _Optional[_Iterable[_Union[Picked, _Mapping]]] = ...) -> None: ...

class AckUpTo(_message.Message):
    __slots__ = ("id", "topic", "partition", "offset")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    id: int
    topic: str
    partition: int
    offset: int
    def __init__(self, id: _Optional[int] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Acked(_message.Message):
    __slots__ = ("id", "late")
    ID_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    id: int
    late: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, id: _Optional[int] = ..., late: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("deliveries", "parts", "picked", "delay_ms", "reason")
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PICKED_FIELD_NUMBER: _ClassVar[int]
    DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    deliveries: _containers.RepeatedScalarFieldContainer[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    picked: _containers.RepeatedCompositeFieldContainer[Picked]
    delay_ms: int
    reason: str
    def __init__(self, deliveries: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., picked: _Optional[_Iterable[_Union[Picked, _Mapping]]] = ..., delay_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ("deliveries", "lease_ms")
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    deliveries: _containers.RepeatedScalarFieldContainer[int]
    lease_ms: int
    def __init__(self, deliveries: _Optional[_Iterable[int]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Recalled(_message.Message):
    __slots__ = ("parts", "picked")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PICKED_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    picked: _containers.RepeatedCompositeFieldContainer[Picked]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., picked: _Optional[_Iterable[_Union[Picked, _Mapping]]] = ...) -> None: ...

class Late(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MakeSubscriptionRequest(_message.Message):
    __slots__ = ("name", "patterns", "mode", "start", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    patterns: _containers.RepeatedScalarFieldContainer[str]
    mode: Mode
    start: Start
    options: WorkOptions
    def __init__(self, name: _Optional[str] = ..., patterns: _Optional[_Iterable[str]] = ..., mode: _Optional[_Union[Mode, str]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., options: _Optional[_Union[WorkOptions, _Mapping]] = ...) -> None: ...

class MakeSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSubscriptionsRequest(_message.Message):
    __slots__ = ("name", "after", "limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    after: str
    limit: int
    def __init__(self, name: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListSubscriptionsResponse(_message.Message):
    __slots__ = ("subscriptions", "has_more")
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    subscriptions: _containers.RepeatedCompositeFieldContainer[Subscription]
    has_more: bool
    def __init__(self, subscriptions: _Optional[_Iterable[_Union[Subscription, _Mapping]]] = ..., has_more: _Optional[bool] = ...) -> None: ...

class Subscription(_message.Message):
    __slots__ = ("name", "mode", "patterns", "is_paused", "made_ns", "options", "members", "redelivered", "dead", "partitions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    MADE_NS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REDELIVERED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    mode: Mode
    patterns: _containers.RepeatedScalarFieldContainer[str]
    is_paused: bool
    made_ns: int
    options: WorkOptions
    members: _containers.RepeatedCompositeFieldContainer[Member]
    redelivered: int
    dead: int
    partitions: _containers.RepeatedCompositeFieldContainer[PartitionWork]
    def __init__(self, name: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., patterns: _Optional[_Iterable[str]] = ..., is_paused: _Optional[bool] = ..., made_ns: _Optional[int] = ..., options: _Optional[_Union[WorkOptions, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., redelivered: _Optional[int] = ..., dead: _Optional[int] = ..., partitions: _Optional[_Iterable[_Union[PartitionWork, _Mapping]]] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "consumers", "backlog", "in_flight", "delayed", "oldest_ns", "absent_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_NS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_NS_FIELD_NUMBER: _ClassVar[int]
    name: str
    consumers: int
    backlog: int
    in_flight: int
    delayed: int
    oldest_ns: int
    absent_ns: int
    def __init__(self, name: _Optional[str] = ..., consumers: _Optional[int] = ..., backlog: _Optional[int] = ..., in_flight: _Optional[int] = ..., delayed: _Optional[int] = ..., oldest_ns: _Optional[int] = ..., absent_ns: _Optional[int] = ...) -> None: ...

class PartitionWork(_message.Message):
    __slots__ = ("member", "topic", "partition", "floor", "next_offset", "acked_beyond", "in_flight")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    ACKED_BEYOND_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    member: str
    topic: str
    partition: int
    floor: int
    next_offset: int
    acked_beyond: int
    in_flight: int
    def __init__(self, member: _Optional[str] = ..., topic: _Optional[str] = ..., partition: _Optional[int] = ..., floor: _Optional[int] = ..., next_offset: _Optional[int] = ..., acked_beyond: _Optional[int] = ..., in_flight: _Optional[int] = ...) -> None: ...

class DeleteSubscriptionRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseSubscriptionRequest(_message.Message):
    __slots__ = ("name", "is_paused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    is_paused: bool
    def __init__(self, name: _Optional[str] = ..., is_paused: _Optional[bool] = ...) -> None: ...

class PauseSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MoveSubscriptionRequest(_message.Message):
    __slots__ = ("name", "start", "member")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    start: Start
    member: str
    def __init__(self, name: _Optional[str] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., member: _Optional[str] = ...) -> None: ...

class MoveSubscriptionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveMemberRequest(_message.Message):
    __slots__ = ("name", "member")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    member: str
    def __init__(self, name: _Optional[str] = ..., member: _Optional[str] = ...) -> None: ...

class RemoveMemberResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDeadLettersRequest(_message.Message):
    __slots__ = ("subscription", "offset", "messages_max", "format")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_MAX_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    offset: int
    messages_max: int
    format: Format
    def __init__(self, subscription: _Optional[str] = ..., offset: _Optional[int] = ..., messages_max: _Optional[int] = ..., format: _Optional[_Union[Format, str]] = ...) -> None: ...

class ListDeadLettersResponse(_message.Message):
    __slots__ = ("messages", "blocks", "next_offset")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    next_offset: int
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., blocks: _Optional[_Iterable[bytes]] = ..., next_offset: _Optional[int] = ...) -> None: ...

class SettleDeadLettersRequest(_message.Message):
    __slots__ = ("subscription", "action", "offsets", "all")
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[SettleDeadLettersRequest.Action]
        ACTION_REDRIVE: _ClassVar[SettleDeadLettersRequest.Action]
        ACTION_DROP: _ClassVar[SettleDeadLettersRequest.Action]
    ACTION_UNSPECIFIED: SettleDeadLettersRequest.Action
    ACTION_REDRIVE: SettleDeadLettersRequest.Action
    ACTION_DROP: SettleDeadLettersRequest.Action
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    action: SettleDeadLettersRequest.Action
    offsets: _containers.RepeatedScalarFieldContainer[int]
    all: bool
    def __init__(self, subscription: _Optional[str] = ..., action: _Optional[_Union[SettleDeadLettersRequest.Action, str]] = ..., offsets: _Optional[_Iterable[int]] = ..., all: _Optional[bool] = ...) -> None: ...

class SettleDeadLettersResponse(_message.Message):
    __slots__ = ("settled",)
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    settled: int
    def __init__(self, settled: _Optional[int] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ("pattern", "after", "limit")
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    after: str
    limit: int
    def __init__(self, pattern: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListTopicsResponse(_message.Message):
    __slots__ = ("topics", "is_complete")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[Topic]
    is_complete: bool
    def __init__(self, topics: _Optional[_Iterable[_Union[Topic, _Mapping]]] = ..., is_complete: _Optional[bool] = ...) -> None: ...

class DescribeTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DescribeTopicResponse(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: Topic
    def __init__(self, topic: _Optional[_Union[Topic, _Mapping]] = ...) -> None: ...

class Topic(_message.Message):
    __slots__ = ("name", "keep", "journal", "partition_count", "messages", "subscribers", "rule", "last_value", "retain", "partitions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    PARTITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBERS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    LAST_VALUE_FIELD_NUMBER: _ClassVar[int]
    RETAIN_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    keep: str
    journal: str
    partition_count: int
    messages: int
    subscribers: int
    rule: str
    last_value: bool
    retain: str
    partitions: _containers.RepeatedCompositeFieldContainer[Partition]
    def __init__(self, name: _Optional[str] = ..., keep: _Optional[str] = ..., journal: _Optional[str] = ..., partition_count: _Optional[int] = ..., messages: _Optional[int] = ..., subscribers: _Optional[int] = ..., rule: _Optional[str] = ..., last_value: _Optional[bool] = ..., retain: _Optional[str] = ..., partitions: _Optional[_Iterable[_Union[Partition, _Mapping]]] = ...) -> None: ...

class Partition(_message.Message):
    __slots__ = ("first_offset", "next_offset", "owner")
    FIRST_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    first_offset: int
    next_offset: int
    owner: Owner
    def __init__(self, first_offset: _Optional[int] = ..., next_offset: _Optional[int] = ..., owner: _Optional[_Union[Owner, _Mapping]] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("journal", "shard", "epoch", "address")
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    journal: str
    shard: int
    epoch: int
    address: str
    def __init__(self, journal: _Optional[str] = ..., shard: _Optional[int] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class DeleteTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PurgeTopicRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PurgeTopicResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRoutesRequest(_message.Message):
    __slots__ = ("topics",)
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topics: _Optional[_Iterable[str]] = ...) -> None: ...

class ListRoutesResponse(_message.Message):
    __slots__ = ("routes",)
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    def __init__(self, routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("topic", "keep", "owners", "exists")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    keep: str
    owners: _containers.RepeatedCompositeFieldContainer[Owner]
    exists: bool
    def __init__(self, topic: _Optional[str] = ..., keep: _Optional[str] = ..., owners: _Optional[_Iterable[_Union[Owner, _Mapping]]] = ..., exists: _Optional[bool] = ...) -> None: ...

class SetCursorRequest(_message.Message):
    __slots__ = ("name", "places")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    name: str
    places: _containers.RepeatedCompositeFieldContainer[CursorPlace]
    def __init__(self, name: _Optional[str] = ..., places: _Optional[_Iterable[_Union[CursorPlace, _Mapping]]] = ...) -> None: ...

class SetCursorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCursorsRequest(_message.Message):
    __slots__ = ("name", "after", "limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    after: str
    limit: int
    def __init__(self, name: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListCursorsResponse(_message.Message):
    __slots__ = ("cursors", "has_more")
    CURSORS_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    cursors: _containers.RepeatedCompositeFieldContainer[Cursor]
    has_more: bool
    def __init__(self, cursors: _Optional[_Iterable[_Union[Cursor, _Mapping]]] = ..., has_more: _Optional[bool] = ...) -> None: ...

class Cursor(_message.Message):
    __slots__ = ("name", "places", "updated_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    UPDATED_NS_FIELD_NUMBER: _ClassVar[int]
    name: str
    places: _containers.RepeatedCompositeFieldContainer[CursorPlace]
    updated_ns: int
    def __init__(self, name: _Optional[str] = ..., places: _Optional[_Iterable[_Union[CursorPlace, _Mapping]]] = ..., updated_ns: _Optional[int] = ...) -> None: ...

class CursorPlace(_message.Message):
    __slots__ = ("topic", "partition", "offset", "journal", "shard", "epoch", "entry", "row", "patterns", "lag")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    PATTERNS_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    topic: str
    partition: int
    offset: int
    journal: str
    shard: int
    epoch: int
    entry: int
    row: int
    patterns: _containers.RepeatedScalarFieldContainer[str]
    lag: int
    def __init__(self, topic: _Optional[str] = ..., partition: _Optional[int] = ..., offset: _Optional[int] = ..., journal: _Optional[str] = ..., shard: _Optional[int] = ..., epoch: _Optional[int] = ..., entry: _Optional[int] = ..., row: _Optional[int] = ..., patterns: _Optional[_Iterable[str]] = ..., lag: _Optional[int] = ...) -> None: ...

class RemoveCursorRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveCursorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatisticsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatisticsResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ("time_ns", "cluster", "node", "server", "message_bytes_max", "batch_bytes_max", "tags_max")
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    BATCH_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    TAGS_MAX_FIELD_NUMBER: _ClassVar[int]
    time_ns: int
    cluster: str
    node: str
    server: str
    message_bytes_max: int
    batch_bytes_max: int
    tags_max: int
    def __init__(self, time_ns: _Optional[int] = ..., cluster: _Optional[str] = ..., node: _Optional[str] = ..., server: _Optional[str] = ..., message_bytes_max: _Optional[int] = ..., batch_bytes_max: _Optional[int] = ..., tags_max: _Optional[int] = ...) -> None: ...
