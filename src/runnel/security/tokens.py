"""Makes tokens, finds the entry of a token, and reads and writes the file that keeps their hashes.

A token has the form `runnel_<id>_<secret>`. The id finds its entry. The file keeps only the SHA-256 of the secret: 256
random bits cannot be guessed, so no slower hash is needed. The file is JSON, readable by its owner alone. It is
replaced as a whole, so that a broker never reads half of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from runnel.errors import ClientFault, RunnelError, SettingsError
from runnel.security.rights import Grant, TokenQuotas

_PREFIX: Final = "runnel_"
_VERSION: Final = 1
_ID_BYTES: Final = 6
_SECRET_BYTES: Final = 32
_TOKEN_CHARS_MAX: Final = 256
_FILE_BYTES_MAX: Final = 16 * 2**20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
# The hash that secrets of unknown ids are compared with, so that refusing them takes as long.
_UNKNOWN_SHA256: Final = "0" * 64


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the file: everything but the secret."""

    id: str
    name: str
    sha256: str  # of the secret, in hexadecimal
    allow: tuple[str, ...]
    made_ns: int
    connections_max: int | None = None  # None: as the settings say
    quotas: TokenQuotas | None = None

    def __repr__(self) -> str:
        return f"<Token {self.name!r} {self.id}>"  # not even the hash


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    version: int
    tokens: tuple[Token, ...] = ()


def new_token(
    name: str,
    grants: Sequence[Grant],
    *,
    now_ns: int,
    connections_max: int | None = None,
    quotas: TokenQuotas | None = None,
) -> tuple[Token, str]:
    """Make an entry and the text of its token, which is stored nowhere."""
    if _NAME.fullmatch(name) is None:
        raise ClientFault(
            f"{name!r} cannot be a token's name: 1 to 64 letters, digits, dots, dashes and underscores, "
            "the first a letter or digit"
        )
    check_grants(name, grants)
    if connections_max is not None and connections_max < 1:
        raise ClientFault(f"token {name!r}: {connections_max} connections would be none")
    token_id = secrets.token_hex(_ID_BYTES)
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    token = Token(
        id=token_id,
        name=name,
        sha256=_hash(secret),
        allow=tuple(map(str, grants)),
        made_ns=now_ns,
        connections_max=connections_max,
        quotas=quotas,
    )
    return token, f"{_PREFIX}{token_id}_{secret}"


def check_grants(name: str, grants: Sequence[Grant]) -> None:
    if not grants:
        raise ClientFault(f"token {name!r} would be allowed nothing: give it a right at least")


def find(tokens: dict[str, Token], text: str) -> Token | None:
    """The entry of a token's text: found by its id; the secret is compared in constant time."""
    if len(text) > _TOKEN_CHARS_MAX or not text.startswith(_PREFIX):
        return None
    token_id, _, secret = text.removeprefix(_PREFIX).partition("_")
    token = tokens.get(token_id)
    expected = _UNKNOWN_SHA256 if token is None else token.sha256
    return token if hmac.compare_digest(_hash(secret), expected) else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


class TokenFile:
    """The file of tokens. A broker only reads it; `runnel token` changes it, one change at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stamp(self) -> tuple[int, int, int] | None:
        """A value that changes when the file is replaced; None: there is no file."""
        try:
            found = self.path.stat()
        except OSError:  # if the file is not just missing, `read` says what is wrong
            return None
        return (found.st_mtime_ns, found.st_ino, found.st_size)

    def read(self) -> tuple[Token, ...]:
        """All entries; empty if there is no file. SettingsError says what is wrong with the file."""
        try:
            with self.path.open("rb") as file:
                text = file.read(_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise SettingsError(f"{self.path} cannot be read: {error.strerror}") from None
        if len(text) > _FILE_BYTES_MAX:
            raise SettingsError(f"{self.path} is larger than {_FILE_BYTES_MAX} bytes")
        try:
            document = msgspec.json.decode(text, type=_Document)
            if document.version != _VERSION:
                raise SettingsError(
                    f"it has version {document.version}; this Runnel knows version {_VERSION}"
                )
            _check_tokens(document.tokens)
        except (msgspec.DecodeError, UnicodeDecodeError, RunnelError) as error:
            raise SettingsError(f"{self.path} is not a file of tokens: {error}") from None
        return document.tokens

    def is_private(self) -> bool:
        """Whether only the owner may read the file, or there is no file."""
        try:
            mode = self.path.stat().st_mode
        except OSError:
            return True
        return not stat.S_IMODE(mode) & 0o077

    @contextmanager
    def changing(self) -> Iterator[list[Token]]:
        """A list of entries to change in place; written when the block ends without an error."""
        try:
            self.path.parent.mkdir(0o700, parents=True, exist_ok=True)
            lock = os.open(self._beside("lock"), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(f"{self.path} cannot be changed: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = list(self.read())
            yield tokens
            _check_tokens(tokens)
            try:
                self._write(tuple(tokens))
            except OSError as error:
                raise SettingsError(f"{self.path} cannot be written: {error.strerror}") from None
        finally:
            os.close(lock)

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{ending}")

    def _write(self, tokens: tuple[Token, ...]) -> None:
        text = msgspec.json.format(
            msgspec.json.encode(_Document(version=_VERSION, tokens=tokens)), indent=2
        )
        fresh = self._beside("new")  # the lock allows one writer at a time
        # A writer that was interrupted may have left one, with any permissions.
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)  # a revoked token must not come back with a power cut
        finally:
            os.close(directory)


def _check_tokens(tokens: Sequence[Token]) -> None:
    """Check what the types of the file do not say. ClientFault names the entry."""
    names: set[str] = set()
    ids: set[str] = set()
    for token in tokens:
        if token.name in names or token.id in ids:
            raise ClientFault(f"token {token.name!r} is there twice, by its name or its id")
        names.add(token.name)
        ids.add(token.id)
        if _SHA256.fullmatch(token.sha256) is None:
            raise ClientFault(f"token {token.name!r}: sha256 is not 64 hexadecimal digits")
        if token.connections_max is not None and token.connections_max < 1:
            raise ClientFault(f"token {token.name!r}: connections_max must be 1 at least")
        if token.quotas is not None:
            for quota, value in msgspec.structs.asdict(token.quotas).items():
                if value is not None and value < 0:
                    raise ClientFault(f"token {token.name!r}: {quota} must be 0 at least")
        for grant in token.allow:
            Grant.parse(grant)
