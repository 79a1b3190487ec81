"""Dials the native listeners of the other nodes on this machine."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from runnel.client.connection import Dial, dial_to, parse_host

_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def dialler(host: str = "127.0.0.1", certificate: str | None = None) -> Callable[[str], Dial]:
    """Dials addresses as nodes name them: without a host it is the one where this node listens, too.

    `certificate`: the file of the certificate that all nodes of this machine show. A node that shows another one is
    none of them. The file is read for each dial: it may have been replaced.
    """
    here = _LOOPBACK.get(host, host)
    shown = f"[{here}]" if ":" in here else here

    def dial(address: str) -> Dial:
        complete = f"{shown}{address}" if address.startswith(":") else address

        async def connect(
            make_protocol: Callable[[], asyncio.BufferedProtocol],
        ) -> asyncio.BaseTransport:
            context = None if certificate is None else _trusting(certificate)
            return await dial_to(parse_host(complete, context))(make_protocol)

        return connect

    return dial


def _trusting(certificate: str) -> ssl.SSLContext:
    """Trusts the certificate in this file alone, without regard to its signer and its name."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
