"""The settings: one frozen struct per section, with defaults, bounds and descriptions.

Everything else is derived from them: the keys of the file, the names of variables, the output of `config show`, and
docs/settings.md.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final

from msgspec import Meta, Struct

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
MILLISECOND_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000
DAY_NS: Final = 86_400 * SECOND_NS

# The limits of the batch format (runnel.formats): a body of 64 MiB, and 64 tags.
BATCH_BYTES_CEILING: Final = 64 * MIB
TAGS_CEILING: Final = 64
INT64_MAX: Final = 2**63 - 1

# The value of `data` for a broker without a directory, which does not touch the disk.
IN_MEMORY: Final = "memory:"

# The value of `cluster.processes` for as many processes as there are cores. In files and flags it is "auto".
AUTO: Final = 0
# The shards of a new journal where several processes may share them, unless `log.journal_shards` is set.
SHARDS_OF_SEVERAL: Final = 16


class Kind(enum.StrEnum):
    """How a value is written; it decides the parser, the printer and the hint of an error."""

    SIZE = "size"
    DURATION = "duration"
    TIME_OF_DAY = "time of day"
    COUNT = "count"
    COUNT_OR_AUTO = "count or auto"
    TEXT = "text"
    TEXTS = "list of texts"
    FLAG = "flag"
    CHOICE = "choice"


_Bytes = Annotated[int, Meta(extra={"kind": Kind.SIZE})]
_Nanoseconds = Annotated[int, Meta(extra={"kind": Kind.DURATION})]

Count = Annotated[int, Meta(ge=1, le=INT64_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Size = Annotated[_Bytes, Meta(ge=1, le=INT64_MAX)]
SizeOrZero = Annotated[_Bytes, Meta(ge=0, le=INT64_MAX)]
SizeInBatch = Annotated[_Bytes, Meta(ge=1, le=BATCH_BYTES_CEILING)]
Duration = Annotated[_Nanoseconds, Meta(ge=1, le=INT64_MAX)]
Interval = Annotated[_Nanoseconds, Meta(ge=MILLISECOND_NS, le=INT64_MAX)]
RotationTime = Annotated[_Nanoseconds, Meta(ge=SECOND_NS, le=INT64_MAX)]
TimeOfDay = Annotated[int, Meta(ge=0, lt=DAY_NS, extra={"kind": Kind.TIME_OF_DAY})]
Tags = Annotated[int, Meta(ge=1, le=TAGS_CEILING)]
OpenFiles = Annotated[int, Meta(ge=16, le=INT64_MAX)]
Threads = Annotated[int, Meta(ge=1, le=64)]
Shards = Annotated[int, Meta(ge=1, le=1024)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Processes = Annotated[int, Meta(ge=AUTO, le=64, extra={"kind": Kind.COUNT_OR_AUTO})]


def key_of_field(field: str) -> str:
    """The key of a field.

    A duration is written with its unit, so `retention_interval_ns` becomes `retention_interval`. In the small tables of
    a rule, where nothing else is measured in bytes, `bytes_max` becomes `bytes`. Every other key is the field's name.
    """
    return "bytes" if field == "bytes_max" else field.removesuffix("_ns")


class Keep(enum.StrEnum):
    """Where the messages of a topic are kept."""

    NONE = "none"
    MEMORY = "memory"
    DISK = "disk"


class Until(enum.StrEnum):
    """When a message may be removed before it reaches its age."""

    ACKED = "acked"


class Rotate(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """When a journal begins a new segment: by size, and by time since a point of the UTC day."""

    bytes_max: Size = 256 * MIB
    every_ns: RotationTime | None = DAY_NS
    at_ns: TimeOfDay = 0


class Retain(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """How long messages are kept. With nothing set they are kept for ever."""

    age_ns: Duration | None = None
    bytes_max: Size | None = None
    until: Until | None = None


class Pin(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """How much readers may hold back from retention. None: no limit."""

    age_ns: Duration | None = 30 * DAY_NS
    bytes_max: Size | None = 100 * GIB


class TopicRule(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """The policy of the topics that match. The first matching rule decides."""

    match: str
    keep: Keep = Keep.DISK
    partitions: Count = 1
    journal: str | None = None
    rotate: Rotate = Rotate()
    retain: Retain = Retain()
    pin: Pin = Pin()
    last_value: bool = False


class ClusterSettings(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """`[cluster]`: the names of cluster and node, and the processes that serve one data directory together."""

    name: str = "runnel"
    node: str = "node-1"
    processes: Processes = 1
    first_port: Port | None = None
    balance: bool = True


class LimitSettings(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """`[limits]`: the limits of any client, the same for every listener."""

    message_bytes_max: SizeInBatch = MIB
    batch_bytes_max: SizeInBatch = 4 * MIB
    tags_max: Tags = 64
    tag_bytes_max: Size = 64 * KIB
    topics_max: Count = 1_000_000
    partitions_max: Count = 1024
    producers_max: Count = 100_000
    cursors_max: Count = 10_000
    cursor_places_max: Count = 10_000
    durable_subscriptions_max: Count = 10_000
    open_files_max: OpenFiles = 256
    allow_wildcard_names: bool = False


class LogSettings(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """`[log]`: how messages are written, indexed, kept and forgotten."""

    write_queue_bytes_max: Size = 64 * MIB
    write_queue_batches_max: Count = 4096
    group_bytes_max: Size = 16 * MIB
    allocate_bytes: SizeOrZero = 16 * MIB
    disk_reserve_bytes: SizeOrZero = 64 * MIB
    writers: Threads = 2
    journal_shards: Shards = 1
    index_cache_bytes_max: Size = 64 * MIB
    segment_runs_max: Count = 1_000_000
    retention_interval_ns: Interval = 10 * SECOND_NS
    producer_age_max_ns: Duration = 30 * DAY_NS
    last_value_bytes_max: Size = MIB
    catalogue_log_bytes_max: Size = 16 * MIB
    state_log_bytes_max: Size = 16 * MIB
    memory_journal_bytes_max: Size = 256 * MIB


class BrokerSettings(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """`[broker]`: live reading, fetching, combining single messages, and monitoring."""

    subscriptions_max: Count = 100_000
    live_queue_bytes_max: Size = 4 * MIB
    fetch_wait_max_ns: Duration = 60 * SECOND_NS
    fetches_waiting_max: Count = 10_000
    gather_messages_max: Count = 1000
    gather_bytes_max: SizeInBatch = MIB
    metrics_interval_ns: Interval = SECOND_NS
    metrics_topics_max: Count = 100


class NativeSettings(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """`[native]`: the listener for native clients."""

    listen: str = "127.0.0.1:7470"
    allow_remote: bool = False
    connections_max: Count = 10_000
    frame_bytes_max: Size = 16 * MIB
    subscriptions_max: Count = 1024
    consumers_max: Count = 1000
    requests_max: Count = 4096
    handshake_timeout_ns: Interval = 5 * SECOND_NS
    idle_timeout_ns: Interval = 60 * SECOND_NS
    drain_timeout_ns: Interval = 10 * SECOND_NS
    tls_certificate: str | None = None
    tls_key: str | None = None


class HttpSettings(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """`[http]`: the listener for REST, server-sent events and Prometheus. It needs the extra `http`."""

    listen: str | None = "127.0.0.1:7480"
    allow_remote: bool = False
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    connections_max: Count = 1000
    body_bytes_max: Size = 16 * MIB
    handshake_timeout_ns: Interval = 5 * SECOND_NS
    request_timeout_ns: Interval = 30 * SECOND_NS
    idle_timeout_ns: Interval = 60 * SECOND_NS
    streams_max: Count = 1000
    consumers_max: Count = 1000
    drain_timeout_ns: Interval = 10 * SECOND_NS
    tls_certificate: str | None = None
    tls_key: str | None = None


class GrpcSettings(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """`[grpc]`: the listener for gRPC clients. It needs the extra `grpc`."""

    listen: str | None = "127.0.0.1:7490"
    allow_remote: bool = False
    calls_max: Count = 1000
    message_bytes_max: Size = 16 * MIB
    handshake_timeout_ns: Interval = 5 * SECOND_NS
    idle_timeout_ns: Interval = 60 * SECOND_NS
    drain_timeout_ns: Interval = 10 * SECOND_NS
    tls_certificate: str | None = None
    tls_key: str | None = None


class Authentication(enum.StrEnum):
    """How a client authenticates."""

    NONE = "none"
    TOKEN = "token"


class LogLevel(enum.StrEnum):
    """The lowest level of log lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class SecuritySettings(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """`[security]`: authentication and the quotas of tokens, the same for every listener."""

    authentication: Authentication = Authentication.NONE
    tokens_file: str | None = None
    token_connections_max: Count = 1000
    token_topics_max: CountOrZero = 100_000
    token_cursors_max: CountOrZero = 1000
    token_subscriptions_max: CountOrZero = 1000
    token_bytes_in_per_s: SizeOrZero = 0
    token_messages_in_per_s: CountOrZero = 0
    token_bytes_out_per_s: SizeOrZero = 0
    token_messages_out_per_s: CountOrZero = 0


class Settings(Struct, frozen=True, kw_only=True, rename=key_of_field):
    """All settings of a Runnel process, merged once at its start."""

    data: str = "./runnel-data"
    log_level: LogLevel = LogLevel.INFO
    cluster: ClusterSettings = ClusterSettings()
    limits: LimitSettings = LimitSettings()
    log: LogSettings = LogSettings()
    broker: BrokerSettings = BrokerSettings()
    native: NativeSettings = NativeSettings()
    http: HttpSettings = HttpSettings()
    grpc: GrpcSettings = GrpcSettings()
    security: SecuritySettings = SecuritySettings()
    topics: tuple[TopicRule, ...] = ()


# One line per key, for `config show --explain` and docs/settings.md. A test keeps it complete.
DESCRIPTIONS: Final[dict[str, str]] = {
    "data": "Data directory, relative to the working directory. memory: keep everything in memory.",
    "log_level": "Lowest level of log lines to write to standard error.",
    "cluster.name": "Name of the cluster, shown to clients. All nodes of a cluster have the same name.",
    "cluster.node": "Name of this node, shown to clients. Several processes are node-1, node-2 and so on.",
    "cluster.processes": "Processes that serve the data directory together. auto: one for each core.",
    "cluster.first_port": "Port of node-1's own listener for clients; node-2 has the next one. none: any free ports.",
    "cluster.balance": "Move shards between processes so that each has about the same load.",
    "limits.message_bytes_max": "Largest payload of one message.",
    "limits.batch_bytes_max": "Largest batch, compressed or not.",
    "limits.tags_max": "Most tags of one message.",
    "limits.tag_bytes_max": "Most bytes of all tag names and values of one message.",
    "limits.topics_max": "Most topics. Beyond this, publishing to a new topic is refused.",
    "limits.partitions_max": "Most partitions of one topic.",
    "limits.producers_max": "Most named producers that the broker remembers.",
    "limits.cursors_max": "Most named cursors.",
    "limits.cursor_places_max": "Most positions of one cursor.",
    "limits.durable_subscriptions_max": "Most acknowledged subscriptions, with or without consumers.",
    "limits.open_files_max": "Most segment and index files that are open at a time.",
    "limits.allow_wildcard_names": "Allow publishing to topics whose names contain *, ? or [.",
    "log.write_queue_bytes_max": "Bytes that may wait to be written. Beyond this, publishers wait.",
    "log.write_queue_batches_max": "Batches that may wait to be written. Beyond this, publishers wait.",
    "log.group_bytes_max": "Most bytes of one write and one sync.",
    "log.allocate_bytes": "How far ahead of its end a segment file is allocated; less if it is small. 0: none.",
    "log.disk_reserve_bytes": "Free disk space below which publishing is refused.",
    "log.writers": "Threads that write and sync. Each serves many journals.",
    "log.journal_shards": "Shards of each new journal, written in parallel. With several processes the default is 16.",
    "log.index_cache_bytes_max": "Memory for the indexes of sealed segments.",
    "log.segment_runs_max": "Most runs in one segment. The segment rotates then, whatever its size.",
    "log.retention_interval": "How often retention looks for segments to remove.",
    "log.producer_age_max": "Time after its last batch when a named producer is forgotten.",
    "log.last_value_bytes_max": "Largest message that is kept as a last value after retention removes it.",
    "log.catalogue_log_bytes_max": "Size of the catalogue's log at which a new snapshot is written.",
    "log.state_log_bytes_max": "Size of a state journal's log at which a new snapshot is written.",
    "log.memory_journal_bytes_max": "Most memory of one in-memory journal. Beyond this, the oldest are removed.",
    "broker.subscriptions_max": "Most live subscriptions of all connections together.",
    "broker.live_queue_bytes_max": "Most bytes of topics that are not kept that wait for one slow subscription.",
    "broker.fetch_wait_max": "Longest time that a fetch may wait for a message.",
    "broker.fetches_waiting_max": "Most fetches that wait for a message at a time.",
    "broker.gather_messages_max": "Most single messages that are combined into one batch.",
    "broker.gather_bytes_max": "Most bytes of single messages that are combined into one batch.",
    "broker.metrics_interval": "How often metrics are published on !system/metrics.",
    "broker.metrics_topics_max": "Number of topics that have metrics of their own: the busiest.",
    "native.listen": "Host and port of the native listener. Port 0: any free port.",
    "native.allow_remote": "Allow listening on non-loopback addresses without authentication.",
    "native.connections_max": "Most connections at a time. A new connection replaces one that has not sent its hello.",
    "native.frame_bytes_max": "Largest frame that a client may send.",
    "native.subscriptions_max": "Most live subscriptions of one connection.",
    "native.consumers_max": "Most consumers of one connection.",
    "native.requests_max": "Most requests of one connection that are not answered yet.",
    "native.handshake_timeout": "Time limit for the TLS handshake of a new connection, and then for its hello.",
    "native.idle_timeout": "A connection that sends nothing for this long is closed.",
    "native.drain_timeout": "Time limit at shutdown for finishing accepted requests.",
    "native.tls_certificate": "PEM file with the certificate chain. none: no TLS.",
    "native.tls_key": "PEM file with the certificate's private key.",
    "http.listen": "Host and port of the HTTP listener. Port 0: any free port. none: no HTTP listener.",
    "http.allow_remote": "Allow listening on non-loopback addresses without authentication.",
    "http.hosts": "Additional Host names for requests without a token. *.name: all names below it. *: any name.",
    "http.cors_origins": "Origins of web pages that may use it, such as https://ui.example. *: all, with tokens.",
    "http.connections_max": "Most connections at a time. A new connection replaces the one that is idle longest.",
    "http.body_bytes_max": "Largest request body. For a bulk publish: the largest line; its body may be larger.",
    "http.handshake_timeout": "Time limit for the TLS handshake of a new connection.",
    "http.request_timeout": "Time limit for receiving a request. For a bulk publish: the time between two lines.",
    "http.idle_timeout": "A connection without a request for this long is closed.",
    "http.streams_max": "Most live streams and waiting requests at a time.",
    "http.consumers_max": "Most polling consumers of acknowledged subscriptions.",
    "http.drain_timeout": "Time limit at shutdown for finishing requests.",
    "http.tls_certificate": "PEM file with the certificate chain. none: no TLS.",
    "http.tls_key": "PEM file with the certificate's private key.",
    "grpc.listen": "Host and port of the gRPC listener. Port 0: any free port. none: no gRPC listener.",
    "grpc.allow_remote": "Allow listening on non-loopback addresses without authentication.",
    "grpc.calls_max": "Most calls at a time. Further calls are refused.",
    "grpc.message_bytes_max": "Largest message of a call.",
    "grpc.handshake_timeout": "Time limit for the TLS handshake of a new connection and its first HTTP/2 frame.",
    "grpc.idle_timeout": "A connection without a call for this long is closed.",
    "grpc.drain_timeout": "Time limit at shutdown for finishing calls.",
    "grpc.tls_certificate": "PEM file with the certificate chain. none: no TLS.",
    "grpc.tls_key": "PEM file with the certificate's private key.",
    "security.authentication": "token: every client must present a token. none: every client may do everything.",
    "security.tokens_file": "File with the hashes of tokens. none: tokens.json in the data directory.",
    "security.token_connections_max": "Most connections and running calls of one token.",
    "security.token_topics_max": "Most kept topics that one token may create. 0: no limit.",
    "security.token_cursors_max": "Most cursors that one token may create. 0: no limit.",
    "security.token_subscriptions_max": "Most acknowledged subscriptions that one token may create. 0: no limit.",
    "security.token_bytes_in_per_s": "Bytes per second that a token may publish before it waits. 0: no limit.",
    "security.token_messages_in_per_s": "Messages per second that a token may publish before it waits. 0: no limit.",
    "security.token_bytes_out_per_s": "Bytes per second that a token may read before it waits. 0: no limit.",
    "security.token_messages_out_per_s": "Messages per second that a token may read before it waits. 0: no limit.",
    "topics.match": "Glob pattern of the topics that this rule applies to. The first matching rule applies.",
    "topics.keep": "none: live only. memory: lost at a restart. disk: stored.",
    "topics.partitions": "Partitions of each topic, fixed when the topic is created.",
    "topics.journal": 'The files it shares; "{topic}" gives each topic its own; none: the rule\'s.',
    "topics.rotate.bytes": "Size at which a new segment begins.",
    "topics.rotate.every": "Time after which a new segment begins. none: by size only.",
    "topics.rotate.at": "UTC time of day from which `rotate.every` counts.",
    "topics.retain.age": "Messages older than this are removed. none: no limit.",
    "topics.retain.bytes": "Journal size above which the oldest segments are removed. none: no limit.",
    "topics.retain.until": "acked: also remove a message when all subscriptions have acknowledged it.",
    "topics.pin.age": "Age up to which readers may hold messages back from retention. none: no limit.",
    "topics.pin.bytes": "Size up to which readers may hold messages back from retention. none: no limit.",
    "topics.last_value": "Keep the last message of every partition after retention removes it.",
}
