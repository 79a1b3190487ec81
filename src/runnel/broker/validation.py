"""Checks batches and messages before they are published, in the same way for every protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from runnel.config import LimitSettings
from runnel.errors import LimitExceededError
from runnel.formats.batch import Batch
from runnel.formats.envelope import Codec
from runnel.formats.message import Message
from runnel.topics.names import check_topic

_PLAIN: Final = Codec.NONE.value  # looking up an enum's member takes several times as long


def check_batch(batch: Batch, limits: LimitSettings) -> None:
    """Refuse a batch whose body cannot be read, or whose messages are larger than allowed.

    Only the table of columns is decoded: a body that readers could not decode is refused here. A compressed body is
    decompressed only if it could contain a message that is too large.
    """
    head = batch.envelope
    if head.body_bytes > limits.batch_bytes_max:
        raise LimitExceededError(
            f"a batch of {head.body_bytes} bytes is larger than limits.batch_bytes_max = "
            f"{limits.batch_bytes_max}"
        )
    is_large = head.body_bytes > limits.message_bytes_max
    if not is_large and (head.codec != _PLAIN or batch.check()):
        return
    table = batch.columns
    if is_large:
        largest = int(np.diff(np.frombuffer(table.payloads.offsets, np.int32)).max())
        if largest > limits.message_bytes_max:
            raise LimitExceededError(_too_large(largest, limits))
    for tags in table.tag_sets:
        _check_tags(tags, limits)


def check_message(message: Message, limits: LimitSettings) -> None:
    check_topic(message.topic)
    if message.size > limits.message_bytes_max:
        raise LimitExceededError(_too_large(message.size, limits))
    if message.tags:
        _check_tags(message.tags, limits)


def _too_large(size: int, limits: LimitSettings) -> str:
    return f"a message of {size} bytes is larger than limits.message_bytes_max = {limits.message_bytes_max}"


def _check_tags(tags: Mapping[str, str], limits: LimitSettings) -> None:
    if len(tags) > limits.tags_max:
        raise LimitExceededError(
            f"a message with {len(tags)} tags; limits.tags_max = {limits.tags_max}"
        )
    size = sum(len(name.encode()) + len(value.encode()) for name, value in tags.items())
    if size > limits.tag_bytes_max:
        raise LimitExceededError(
            f"a message with {size} bytes of tags; limits.tag_bytes_max = {limits.tag_bytes_max}"
        )
