"""Listening sockets of one process among several."""

from __future__ import annotations

import os
import socket

import pytest

from runnel.errors import SettingsError
from runnel.platform.listening_socket import inherited_socket, own_socket_beside
from tests.server.server_process import held_port


def test_own_socket_listens_on_the_same_host_at_a_port_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as shared:
        with own_socket_beside(shared, None) as own:
            assert own.getsockname()[0] == "127.0.0.1"
            assert own.getsockname()[1] not in (0, shared.getsockname()[1])
            socket.create_connection(own.getsockname()).close()
        with held_port() as port, own_socket_beside(shared, port) as own:
            assert own.getsockname() == ("127.0.0.1", port)


def test_own_port_that_is_in_use_is_refused_by_the_name_of_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as shared:
        port = shared.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"^cluster.first_port: .*:{port} is in use"):
            own_socket_beside(shared, port)


def test_inherited_socket_is_not_inherited_further() -> None:
    with socket.create_server(("127.0.0.1", 0)) as shared:
        descriptor = os.dup(shared.fileno())
        os.set_inheritable(descriptor, True)
        with inherited_socket(descriptor) as inherited:
            assert not inherited.get_inheritable()
            assert inherited.getsockname() == shared.getsockname()
