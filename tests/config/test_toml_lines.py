"""The lines that messages point at."""

from __future__ import annotations

from runnel.config.toml_lines import key_lines


def test_keys_headers_and_rules_are_found() -> None:
    text = """\
# data = "no"
data = "x"
limits.tags_max = 5

[ log ]  # comment
writers = 1
"allocate_bytes" = 5

[[topics]]
match = "a"
rotate = { bytes = 5 }

[[topics]]
[topics.retain]
age = "7d"
"""
    assert key_lines(text) == {
        "data": 2,
        "limits.tags_max": 3,
        "log": 5,
        "log.writers": 6,
        "log.allocate_bytes": 7,
        "topics[0]": 9,
        "topics[0].match": 10,
        "topics[0].rotate": 11,
        "topics[1]": 13,
        "topics[1].retain": 14,
        "topics[1].retain.age": 15,
    }


def test_text_in_triple_quotes_holds_no_keys() -> None:
    text = "data = '''\nwriters = 5\n[log]\n'''\n[limits]\ntags_max = 3"
    assert key_lines(text) == {"data": 1, "limits": 5, "limits.tags_max": 6}
