"""Names in order, found by their beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runnel.topics.sorted_names import SortedNames

names = st.text("ab/é\U0010ffff", min_size=1, max_size=4)


def paged(held: SortedNames, prefix: str, names_max: int) -> list[str]:
    found: list[str] = []
    while page := held.page(prefix, found[-1] if found else "", names_max):
        assert len(page) <= names_max
        found += page
    return found


@given(
    st.lists(st.tuples(st.booleans(), names), max_size=80),
    st.text("ab/é\U0010ffff", max_size=3),
    st.integers(1, 5),
)
def test_pages_give_the_names_with_a_prefix_in_order(
    changes: list[tuple[bool, str]], prefix: str, names_max: int
) -> None:
    held = SortedNames(chunk_max=3)
    model: set[str] = set()
    for adding, name in changes:
        if adding and name not in model:
            held.add(name)
            model.add(name)
        elif not adding and name in model:
            held.remove(name)
            model.remove(name)
    assert paged(held, prefix, names_max) == sorted(n for n in model if n.startswith(prefix))
    assert paged(held, "", names_max) == sorted(model)


def test_a_page_goes_on_after_a_name_that_is_no_longer_there() -> None:
    held = SortedNames(chunk_max=8)
    for name in ("a", "b", "c", "d", "e"):
        held.add(name)
    assert held.page("", "", 2) == ["a", "b"]
    held.remove("b")
    held.add("bb")
    assert held.page("", "b", 1) == ["bb"]
