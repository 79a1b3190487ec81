"""Every byte layout of Runnel, as pure functions of bytes; docs/protocol.md draws them. Read `batch.py` first.

message       one message, as a reader gets it
table         columns in memory
building      makes columns from values
columns       the body of a batch: columns in Arrow's buffer layout
body_layout, plain_bodies    where the buffers of a body lie; bodies of few plain messages, without columns
envelope      the part of a batch that the broker reads and fills in: runs, position, producer, checksum
block         envelope and body, as in a segment file and in a frame
compression   bodies in lz4 and zstd
batch         the table that users hold; joins the modules above
selection     takes rows out of batches, and joins batches
single_messages    single messages cut out of a batch, each as a batch
arrow         a batch as a pyarrow.RecordBatch (the only module that needs pyarrow)
frames        length-prefixed frames of the native protocol
heads, wire, work_heads, cluster_heads    the requests and answers of the native protocol
metrics_report    the metrics of a node, for another one
dead_letters  the tags of a dead letter
traces        trace context in tags
checksum, memory, ksuid    CRC-32C, aligned buffers, and the form of a message's uid
"""

__all__ = [
    "arrow",
    "batch",
    "block",
    "checksum",
    "cluster_heads",
    "column_builder",
    "columns",
    "dead_letters",
    "envelope",
    "frames",
    "heads",
    "ksuid",
    "memory",
    "message",
    "metrics_report",
    "plain_bodies",
    "single_messages",
    "table",
    "traces",
    "wire",
    "work_heads",
]
