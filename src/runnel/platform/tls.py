"""TLS for a listener: certificate and key from the files that its settings name, reloaded when they are replaced."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TypeAlias

from runnel.errors import SettingsError

_Stamps: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class TlsFiles:
    """A certificate chain and its key. After a reload of unusable files the last good pair stays in use."""

    def __init__(self, section: str, certificate: str, key: str) -> None:
        self.certificate = certificate
        self.key = key
        self._section = section
        self._stamps = self._look()
        self.context = self._loaded(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        """The server's context. Handshakes after `reload` use the new certificate; open connections keep theirs."""

    @classmethod
    def of(cls, section: str, certificate: str | None, key: str | None) -> TlsFiles | None:
        """None if no certificate is set. SettingsError says which file is wrong, and how."""
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            given, missing = ("tls_key", "tls_certificate")
            if key is None:
                given, missing = missing, given
            raise SettingsError(
                f"{section}.{given} is set and {section}.{missing} is not: TLS needs both"
            )
        return cls(section, certificate, key)

    def reload(self) -> bool:
        """Read the files again if they were replaced; returns whether they were.

        After a SettingsError the last good pair stays in use.
        """
        stamps = self._look()
        if stamps == self._stamps:
            return False
        self._stamps = (
            stamps  # an error is reported once, and the files are tried again when one has changed
        )
        # Try them in a new context first: a certificate whose key is not yet replaced must not be used.
        self._loaded(ssl.create_default_context(ssl.Purpose.CLIENT_AUTH))
        try:
            self._loaded(self.context)
        except SettingsError:
            self._stamps = ()  # a file was replaced in between: a half pair may be in use, so try again soon
            raise
        return True

    def _look(self) -> _Stamps:
        return tuple(map(_stamp, (self.certificate, self.key)))

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        for name, path in (("tls_certificate", self.certificate), ("tls_key", self.key)):
            try:
                with Path(path).open("rb") as file:
                    file.read(1)
            except OSError as error:
                raise self._unreadable(name, path, error) from None
        try:
            # The empty password keeps OpenSSL from asking for one at the terminal.
            context.load_cert_chain(self.certificate, self.key, password="")
        except ssl.SSLError as error:
            raise SettingsError(
                f'{self._section}.tls_certificate = "{self.certificate}" and '
                f'{self._section}.tls_key = "{self.key}": {_problem(error)}'
            ) from None
        return context

    def _unreadable(self, name: str, path: str, error: OSError) -> SettingsError:
        return SettingsError(f'{self._section}.{name} = "{path}" cannot be read: {error.strerror}')


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Changes when the file is replaced; None: stat failed."""
    try:
        found = Path(path).stat()
    except OSError:  # opening the file reports the reason
        return None
    return (found.st_mtime_ns, found.st_ino, found.st_size)


def _problem(error: ssl.SSLError) -> str:
    reason = str(error.reason)  # may be None, against its annotation
    if reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    if reason in ("NO_START_LINE", "None"):
        return "one of them has no certificate, or no private key, in PEM; or the key is encrypted"
    return reason.replace("_", " ").lower()
