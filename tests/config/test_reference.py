"""Every setting is described once, and docs/settings.md is in step."""

from __future__ import annotations

from pathlib import Path

from runnel.config.keys import ALL_KEYS, PLAIN_KEYS
from runnel.config.layers import OTHER_VARIABLES, TOPICS_VARIABLE
from runnel.config.renderer import reference_page
from runnel.config.settings import DESCRIPTIONS, Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_every_key_is_described_in_one_line_and_nothing_else_is() -> None:
    assert list(DESCRIPTIONS) == list(ALL_KEYS)
    for description in DESCRIPTIONS.values():
        assert description.endswith(".")
        assert "\n" not in description
        assert "|" not in description


def test_every_default_is_within_its_own_bounds() -> None:
    for key in ALL_KEYS.values():
        if not key.required and key.default is not None:
            assert key.parse(_as_in_toml(key.write(key.default))) == key.default


def test_variables_are_unique() -> None:
    variables = [key.variable for key in PLAIN_KEYS.values()]
    variables += [TOPICS_VARIABLE, *OTHER_VARIABLES]
    assert len(set(variables)) == len(variables)


def test_reference_page_is_in_step_with_the_settings() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page(), (
        "write it anew: runnel config reference > docs/settings.md"
    )


def test_agreed_keys_are_spelled_without_the_unit_of_their_field() -> None:
    assert "log.retention_interval" in ALL_KEYS
    assert "topics.rotate.bytes" in ALL_KEYS
    assert "topics.retain.age" in ALL_KEYS
    assert Settings().log.retention_interval_ns == 10 * 10**9


def _as_in_toml(text: str) -> object:
    import tomllib

    return tomllib.loads(f"value = {text}")["value"]
