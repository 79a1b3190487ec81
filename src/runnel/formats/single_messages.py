"""Single messages cut out of a batch, each as its own batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runnel.formats.batch import Batch


def singles(batch: Batch) -> Iterator[Batch]:
    """Each message as its own batch. Halving is quicker: a cut costs as much as the runs of the batch it cuts."""
    if len(batch) == 1:
        yield batch
    else:
        half = len(batch) // 2
        yield from singles(batch.slice(0, half))
        yield from singles(batch.slice(half))


def messages_of(
    batch: Batch, wanted: Mapping[tuple[str, int], int]
) -> Iterator[tuple[tuple[str, int], Batch]]:
    """The wanted messages in a batch, one offset per topic and partition. Missing ones are left out."""
    rows: dict[int, tuple[str, int]] = {}
    begin = 0
    for run in batch.runs():
        key = (run.topic, run.partition)
        row = wanted.get(key, -1) - run.base_offset
        if 0 <= row < run.count:
            rows[begin + row] = key
        begin += run.count
    if rows:
        yield from zip(rows.values(), singles(batch.take(list(rows))), strict=True)
