"""Tokens: how they are made, and the file that keeps their hashes.

A token reads `runnel_<id>_<secret>`. The id finds its entry; of the secret, 256 random bits, the file has only the
SHA-256: there is nothing to guess, so nothing slower is needed. The file is JSON, readable by its owner alone, and is
replaced as a whole, so that a broker which looks at it never sees half of one.
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
# Compared with where there is no such token, so that this takes as long.
_NOBODY: Final = "0" * 64


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
    """An entry, and the text of the token, which exists nowhere else."""
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
    """The entry that a token's text belongs to; by id, and the secret compared in constant time."""
    if len(text) > _TOKEN_CHARS_MAX or not text.startswith(_PREFIX):
        return None
    token_id, _, secret = text.removeprefix(_PREFIX).partition("_")
    token = tokens.get(token_id)
    expected = _NOBODY if token is None else token.sha256
    return token if hmac.compare_digest(_hash(secret), expected) else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


class TokenFile:
    """The file. A broker only reads it; `runnel token` changes it, one change at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stamp(self) -> tuple[int, int, int] | None:
        """Differs once the file has been replaced; None: there is none."""
        try:
            found = self.path.stat()
        except OSError:  # `read` says what is wrong, if it is not just missing
            return None
        return (found.st_mtime_ns, found.st_ino, found.st_size)

    def read(self) -> tuple[Token, ...]:
        """All entries; none where there is no file. SettingsError says what is wrong with it."""
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
        """Whether only its owner may read it, or there is none."""
        try:
            mode = self.path.stat().st_mode
        except OSError:
            return True
        return not stat.S_IMODE(mode) & 0o077

    @contextmanager
    def changing(self) -> Iterator[list[Token]]:
        """The entries to be changed in place; written when the block ends well."""
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
        fresh = self._beside("new")  # under the lock there is one at a time
        fresh.unlink(
            missing_ok=True
        )  # of somebody who did not get further, with whatever permissions
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
    """What the file's own types do not say. ClientFault names the entry."""
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
