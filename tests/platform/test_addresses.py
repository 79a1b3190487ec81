"""`host:port` as settings have it, and what is said of it when it is none."""

from __future__ import annotations

import pytest

from runnel.errors import SettingsError
from runnel.platform.addresses import parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7470", ("127.0.0.1", 7470)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:65535", ("::1", 65_535)),
    ],
)
def test_host_and_port_are_read(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, key="native.listen") == address


@pytest.mark.parametrize(
    ("section", "port"), [("native", "7470"), ("http", "7480"), ("grpc", "7490")]
)
def test_the_example_of_what_is_right_is_the_listeners_own(section: str, port: str) -> None:
    key = f"{section}.listen"
    with pytest.raises(SettingsError) as refused:
        parse_address(port, key=key)
    assert str(refused.value) == f'{key} = "{port}" is not host:port, as "127.0.0.1:{port}"'
    with pytest.raises(SettingsError) as refused:
        parse_address(f"::1:{port}", key=key)
    assert f'as "[::1]:{port}"' in str(refused.value)
