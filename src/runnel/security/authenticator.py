"""The authenticator of all listeners: gives a client the rights of its token, for as long as the token is valid.

A listener calls `admit` for every connection, or for every call if calls are independent, and `leave` at its end. The
authenticator checks the file of tokens on every admission, and a few times a second for clients that are connected.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from runnel.config import IN_MEMORY, Authentication, SecuritySettings, Settings
from runnel.errors import (
    ClosedError,
    LimitExceededError,
    RunnelError,
    SettingsError,
    UnauthenticatedError,
)
from runnel.platform.clock import Clock
from runnel.platform.diagnostics import get_logger
from runnel.security.penalties import Penalties
from runnel.security.rights import Grant, Rights, TokenQuotas
from runnel.security.tokens import Token, TokenFile, find

logger = get_logger("runnel.security")

_WATCH_SECONDS: Final = 0.25

_NEEDED: Final = (
    "this broker asks for a token, and none was shown: `runnel token add NAME --allow RIGHT:PATTERN` makes one; "
    "clients take it from the variable RUNNEL_TOKEN, or as `Authorization: Bearer …`"
)


class TokenChange(enum.StrEnum):
    """What happened to a token while the broker was running."""

    ADDED = "added"
    CHANGED = "changed"
    REVOKED = "revoked"


class WrongTokenError(UnauthenticatedError):
    """The client sent an unknown token. Only this error may be a guess: a client without a token guesses nothing."""


class AuthenticatedClient:
    """One admitted connection or call. `rights` is None if everything is allowed."""

    __slots__ = ("_admitted", "_end", "_on_revoked", "rights", "token")

    def __init__(
        self, rights: Rights | None, admitted: _Admitted | None, token: str | None = None
    ) -> None:
        self.rights: Final = rights
        self.token: Final = token
        """The secret itself, with which another node of the cluster is asked on the client's behalf."""
        self._admitted = admitted  # None: it has left, or needed no token
        self._on_revoked: Callable[[RunnelError], object] | None = None
        self._end: RunnelError | None = None

    @property
    def name(self) -> str:
        """The name of the token; empty if the broker requires none."""
        return "" if self.rights is None else self.rights.name

    @property
    def why_over(self) -> RunnelError | None:
        """The error that `on_revoked` passes, once the token has ended; for callers that poll."""
        return self._end

    def on_revoked(self, react: Callable[[RunnelError], object]) -> None:
        """Call `react` once, when the token is revoked or its rights change.

        UnauthenticatedError: the token was revoked, and connecting again does not help. ClosedError: connecting again
        gives the new rights.
        """
        if self._admitted is None:
            return
        self._on_revoked = react
        if self._end is not None:
            self.revoke(self._end)

    def revoke(self, error: RunnelError) -> None:
        """End the admission with this error. Only the authenticator calls it."""
        self._end = error
        react, self._on_revoked = self._on_revoked, None
        if react is not None:
            react(error)

    def leave(self) -> None:
        """End the admission. A second call does nothing."""
        self._on_revoked = None
        if self._admitted is not None:
            self._admitted.clients.discard(self)
            self._admitted = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()


class _Admitted:
    """A token in use, with its rights and the clients that it admitted."""

    def __init__(self, token: Token) -> None:
        self.token: Final = token
        self.rights: Final = Rights(
            token.name, [Grant.parse(text) for text in token.allow], token.quotas
        )
        self.clients: set[AuthenticatedClient] = set()


UNRESTRICTED: Final = AuthenticatedClient(None, None)
"""A client that needs no token: it may do everything."""


class Authenticator:
    """Admits clients by their tokens, and ends their admissions when a token is revoked or changed.

    Make one with `Authenticator.open`; `start` it within a loop, and `close` it after the listeners.
    """

    def __init__(self, file: TokenFile | None, clock: Clock, connections_max: int) -> None:
        self._file = file  # None: no token is required
        self._clock = clock
        self._connections_max = connections_max
        self._stamp: object = None
        self._tokens: dict[str, Token] = {}
        self._admitted: dict[str, _Admitted] = {}
        self.on_token_ended: list[Callable[[Rights], object]] = []
        """Called with the rights of a token that was revoked or changed: for what outlives its connections."""
        self.on_token_changed: list[Callable[[TokenChange, str], object]] = []
        """Called for each token that was added, changed or revoked since the file was first read."""
        self._penalties = Penalties(clock)
        self._missing_tokens = Penalties(clock, "no token was shown")
        self._watch_task: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, settings: Settings, clock: Clock) -> Authenticator:
        """SettingsError says why the tokens cannot be read."""
        security = settings.security
        if security.authentication is Authentication.NONE:
            if _has_quotas(security):
                logger.warning(
                    "the quotas of security.token_… have no effect: no token is required",
                    authentication="none",
                )
            return cls(None, clock, security.token_connections_max)
        authenticator = cls(TokenFile(tokens_path(settings)), clock, security.token_connections_max)
        authenticator._read()
        if not authenticator._tokens:
            logger.warning(
                "no client can connect: there is no token yet; `runnel token add NAME --allow RIGHT:PATTERN` "
                "makes one, at any time",
                file=str(tokens_path(settings)),
            )
        return authenticator

    @property
    def asks(self) -> bool:
        """Whether a token is needed."""
        return self._file is not None

    @property
    def token_count(self) -> int:
        return len(self._tokens)

    @property
    def refused_count(self) -> int:
        """How often clients sent a wrong token, or none, since the broker began."""
        return self._penalties.failure_count + self._missing_tokens.failure_count

    def start(self) -> None:
        if self._file is not None:
            self._watch_task = asyncio.get_running_loop().create_task(
                self._watch(), name="runnel-tokens"
            )

    async def close(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.wait({self._watch_task})

    def use(self, security: SecuritySettings) -> None:
        """Apply a new limit of connections, and read the tokens again at once. Admitted clients stay."""
        self._connections_max = security.token_connections_max
        if self._file is not None:
            self._stamp = None  # read the file even if it was replaced without a new stamp
            self._read_if_changed()

    # --- Admission ---

    def admit(self, token: str | None) -> AuthenticatedClient:
        """Admit a client with this token. UnauthenticatedError: await `penalty` before answering it."""
        if self._file is None:
            return UNRESTRICTED
        self._read_if_changed()
        if token is None:
            raise UnauthenticatedError(_NEEDED)
        found = find(self._tokens, token)
        if found is None:
            raise WrongTokenError("the token is not known here: it was revoked, or mistyped")
        admitted = self._admitted.get(found.id)
        if admitted is None:
            admitted = self._admitted[found.id] = _Admitted(found)
        count_max = found.connections_max or self._connections_max
        if len(admitted.clients) >= count_max:
            raise LimitExceededError(
                f"token {found.name!r} has {count_max} connections or calls under way; no more are allowed"
            )
        client = AuthenticatedClient(admitted.rights, admitted, token)
        admitted.clients.add(client)
        return client

    async def penalty(self, error: UnauthenticatedError, address: str) -> None:
        """Wait before answering this error: the longer, the more wrong tokens the address has sent lately.

        A client without a token does not wait.
        """
        if isinstance(error, WrongTokenError):
            await self._penalties.wait(address)
        else:
            self._missing_tokens.note(address)

    # --- The file ---

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(_WATCH_SECONDS)
            try:
                self._read_if_changed()
            except Exception:
                # A bug. The watch continues, or revoked tokens would stay valid.
                logger.exception("the file of tokens could not be checked")

    def _read_if_changed(self) -> None:
        """Read the file again if it was changed. A file that cannot be read changes nothing."""
        assert self._file is not None
        stamp = self._file.stamp()
        if stamp == self._stamp:
            return
        try:
            self._read()
        except SettingsError as error:
            self._stamp = stamp
            logger.error(  # noqa: TRY400 - a wrong file, not a bug
                "the tokens cannot be read; those known so far stay valid", problem=str(error)
            )

    def _read(self) -> None:
        assert self._file is not None
        stamp = (
            self._file.stamp()
        )  # before reading: a file that replaces this one has another stamp
        before, self._tokens = self._tokens, {token.id: token for token in self._file.read()}
        self._stamp = stamp
        if not self._file.is_private():
            logger.warning(
                "the file of tokens can be read by others; chmod 600 would keep it from them",
                file=str(self._file.path),
            )
        for token_id, admitted in list(self._admitted.items()):
            if self._tokens.get(token_id) != admitted.token:
                del self._admitted[token_id]
                self._end(admitted, is_revoked=token_id not in self._tokens)
        for change, name in _changes(before, self._tokens):
            for react in self.on_token_changed:
                react(change, name)

    def _end(self, admitted: _Admitted, *, is_revoked: bool) -> None:
        name = admitted.token.name
        error: RunnelError = (
            UnauthenticatedError(f"token {name!r} was revoked")
            if is_revoked
            else ClosedError(f"the rights of token {name!r} were changed; connect again")
        )
        event = "a token was revoked" if is_revoked else "a token was changed"
        logger.info(event, token=name, ended=len(admitted.clients))
        for react in self.on_token_ended:
            react(admitted.rights)
        for client in list(admitted.clients):
            try:
                client.revoke(error)
            except Exception:
                # A bug in one listener must not keep other connections of the token alive.
                logger.exception(
                    "a connection could not be closed after its token was revoked or changed"
                )


def _has_quotas(security: SecuritySettings) -> bool:
    """Whether a quota differs from its default."""
    usual = SecuritySettings()
    names = (f"token_{quota}" for quota in TokenQuotas.__struct_fields__)
    return any(getattr(security, name) not in (0, getattr(usual, name)) for name in names)


def _changes(
    before: Mapping[str, Token], after: Mapping[str, Token]
) -> Iterator[tuple[TokenChange, str]]:
    for token_id, token in before.items():
        if token_id not in after:
            yield TokenChange.REVOKED, token.name
    for token_id, token in after.items():
        if token_id not in before:
            yield TokenChange.ADDED, token.name
        elif token != before[token_id]:
            yield TokenChange.CHANGED, token.name


def tokens_path(settings: Settings) -> Path:
    """The path of the file of tokens. SettingsError: a broker in memory has no directory for it."""
    if settings.security.tokens_file is not None:
        return Path(settings.security.tokens_file)
    if settings.data == IN_MEMORY:
        raise SettingsError(
            'data = "memory:" has no directory for tokens.json: set security.tokens_file as well'
        )
    return Path(settings.data) / "tokens.json"
