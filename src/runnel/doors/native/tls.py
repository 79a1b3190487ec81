"""TLS for the door's sockets, from the two files that the settings name."""

from __future__ import annotations

import ssl
from pathlib import Path

from runnel.config import NativeSettings
from runnel.errors import SettingsError


def tls_context(settings: NativeSettings) -> ssl.SSLContext | None:
    """The server's context; None where no certificate is set. SettingsError says which file is wrong, and how."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = ("tls_key", "tls_certificate")
        if key is None:
            given, missing = missing, given
        raise SettingsError(f"native.{given} is set and native.{missing} is not: TLS needs both")
    _check_readable("native.tls_certificate", certificate)
    _check_readable("native.tls_key", key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # The empty password: without one, a key that wants a password would ask for it at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise SettingsError(
            f'native.tls_certificate = "{certificate}" and native.tls_key = "{key}": {_problem(error)}'
        ) from None
    return context


def _check_readable(name: str, path: str) -> None:
    try:
        with Path(path).open("rb") as file:
            file.read(1)
    except OSError as error:
        raise SettingsError(f'{name} = "{path}" cannot be read: {error.strerror}') from None


def _problem(error: ssl.SSLError) -> str:
    reason = str(error.reason)  # None at times, whatever its type says
    if reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    if reason in ("NO_START_LINE", "None"):
        return "one of them has no certificate, or no private key, in PEM; or the key is encrypted"
    return reason.replace("_", " ").lower()
