"""Makes one column from the tags of several batches. Each tag set is made once, and rows refer to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from runnel.formats.message import NO_TAGS
from runnel.formats.table import Columns

_STRING: Final = pa.string()
_TAGS: Final = pa.map_(_STRING, _STRING)

_TagSet: TypeAlias = tuple[tuple[str, str], ...]


class TagRows(NamedTuple):
    """The tag sets that occur in some rows, and the number of each row's set."""

    sets: Sequence[_TagSet]
    numbers: NDArray[np.int32]

    @classmethod
    def of(cls, parts: Sequence[Columns]) -> TagRows:
        """The tags of the rows of all parts, one part after the other."""
        known: dict[_TagSet, int] = {}
        by_part: list[NDArray[np.int32]] = []
        sets: tuple[Mapping[str, str], ...] | None = None
        numbers = np.empty(0, np.int32)
        for part in parts:
            if part.tag_sets != sets:  # batches of one publisher mostly have the same sets
                sets = part.tag_sets
                numbers = np.array(
                    [
                        known.setdefault(tuple(tags.items()), len(known))
                        for tags in sets or (NO_TAGS,)
                    ],
                    np.int32,
                )
            index = np.frombuffer(part.tag_index, np.int32)
            if len(index) == part.count:
                by_part.append(np.take(numbers, index))
            else:  # one set for all rows, or no tags
                by_part.append(numbers[:1].repeat(part.count))
        return cls(list(known), np.concatenate(by_part))

    def maps(self) -> pa.Array:
        return pa.array(self.sets, _TAGS).take(pa.array(self.numbers))

    def coded_maps(self) -> pa.Array:
        """The maps with names and values as dictionary arrays."""
        names: dict[str, int] = {}
        values: dict[str, int] = {}
        pairs = [pair for tags in self.sets for pair in tags]
        name_codes = [names.setdefault(name, len(names)) for name, _ in pairs]
        value_codes = [values.setdefault(value, len(values)) for _, value in pairs]
        lengths = np.array([len(tags) for tags in self.sets], np.int32)
        spread = self._even if (lengths == lengths[0]).all() else self._uneven
        offsets, (of_names, of_values) = spread(lengths, name_codes, value_codes)
        return pa.MapArray.from_arrays(offsets, _coded(of_names, names), _coded(of_values, values))

    def _even(
        self, lengths: NDArray[np.int32], *columns: Sequence[int]
    ) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:
        """The offsets of each row's tags, and the columns of all sets' tags repeated for all rows.

        For sets of equal length, in a fifth of the time of `_uneven`.
        """
        length = int(lengths[0])
        offsets = np.arange(len(self.numbers) + 1, dtype=np.int32) * np.int32(length)
        sets = [np.array(codes, np.int32).reshape(len(lengths), length) for codes in columns]
        return offsets, [np.take(codes, self.numbers, axis=0).ravel() for codes in sets]

    def _uneven(
        self, lengths: NDArray[np.int32], *columns: Sequence[int]
    ) -> tuple[NDArray[np.int32], list[NDArray[np.int32]]]:
        """As `_even`, for sets of any lengths."""
        begins = np.cumsum(lengths, dtype=np.int32) - lengths
        counts = np.take(lengths, self.numbers)
        offsets = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        places = np.repeat(np.take(begins, self.numbers) - offsets[:-1], counts)
        places += np.arange(len(places), dtype=np.int32)
        return offsets, [np.take(np.array(codes, np.int32), places) for codes in columns]


def _coded(codes: NDArray[np.int32], values: Mapping[str, int]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(codes, pa.array(list(values), _STRING), safe=False)
