"""Names become paths: no two meet, none leaves its folder."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from runnel.errors import InvalidNameError
from runnel.log.segments import paths
from runnel.topics.names import Label, check_label


def is_journal_name(name: str) -> bool:
    try:
        check_label(Label.JOURNAL, name)
    except InvalidNameError:
        return False
    return True


# Names that are near to each other: in case, in escapes, in Unicode forms, in length.
NEAR = st.lists(
    st.sampled_from(
        ["a", "A", "%", "%41", "%61", "~", "/", ".", "..", "\\", " ", "ä", "a\u0308", "名", "-"]
    ),
    min_size=1,
    max_size=6,
).map("".join)
LONG = st.builds(
    lambda name, count, end: name * count + end,
    NEAR,
    st.integers(1, 60),
    st.sampled_from(["", "x"]),
)
NAMES = (st.text(max_size=60) | NEAR | LONG).filter(is_journal_name)


@given(NAMES)
@example("..")
@example(".")
@example("../../etc/passwd")
@example("/")
@example("con")
@example("a\\b")
@example("x" * 255)
def test_folder_is_one_plain_path_component_of_bounded_length(name: str) -> None:
    folder = paths.folder_name(name)
    assert 0 < len(folder) <= 120
    assert folder.isascii()
    assert not set(folder) & set("/\\. :\0")
    assert paths.journal_folder("data", name) == f"data/journals/{folder}"


@given(NAMES, NAMES)
@example("a", "A")
@example("%41", "A")
@example("ä", "a\u0308")
@example("x" * 254, "x" * 255)
@example("x" * 120, "x" * 121)
def test_different_names_have_different_folders_even_where_case_is_folded(
    one: str, other: str
) -> None:
    if one != other:
        assert paths.folder_name(one).casefold() != paths.folder_name(other).casefold()


@given(NAMES)
def test_name_can_be_told_from_its_folder_unless_it_is_long(name: str) -> None:
    folder = paths.folder_name(name)
    if "~" not in folder:
        assert paths.journal_name(folder) == name


@given(st.integers(1, 10**19), st.integers(0, 10**8))
def test_segment_file_tells_its_number_and_generation(number: int, generation: int) -> None:
    path = paths.segment_path("data/journals/main/0", number, generation)
    folder, _, name = path.rpartition("/")
    assert folder == "data/journals/main/0"
    assert paths.segment_number(name) == (number, generation)
    assert paths.index_path(path) == path.removesuffix(".segment") + ".index"


def test_names_of_segments_sort_by_number() -> None:
    names = [paths.segment_path("", number, 0) for number in (1, 9, 10, 99, 100, 10**12)]
    assert names == sorted(names)


@pytest.mark.parametrize(
    "name",
    [
        "name",
        "00000000000000000001-0.index",
        "00000000000000000001-0.segment.new",
        "1-0.segment",
        "00000000000000000001.segment",
        "x00000000000000000001-0.segment",
        "0000000000000000000a-0.segment",
    ],
)
def test_other_files_are_no_segments(name: str) -> None:
    assert paths.segment_number(name) is None
