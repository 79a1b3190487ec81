"""Publishing: messages are buffered, built into batches, and sent shard by shard. Read `publisher.py` first."""

from runnel.client.producer.batch_builder import PendingRows
from runnel.client.producer.publisher import (
    BATCH_BYTES_MAX,
    BATCH_MESSAGES_MAX,
    Publisher,
    checked_level,
)
from runnel.client.producer.send_buffer import SendBuffer, as_bytes, check_tags, check_uid

__all__ = [
    "BATCH_BYTES_MAX",
    "BATCH_MESSAGES_MAX",
    "PendingRows",
    "Publisher",
    "SendBuffer",
    "as_bytes",
    "check_tags",
    "check_uid",
    "checked_level",
]
