"""The authenticator of all doors: whoever shows a token gets its rights, for as long as the token is known.

A door asks `admit` for every connection, or for every call where calls come one by one, and lets the pass go when it
is over. The file of tokens is looked at on every admission, and a few times a second for those who are inside.
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
    """What became of a token while the broker was running."""

    ADDED = "added"
    CHANGED = "changed"
    REVOKED = "revoked"


class WrongTokenError(UnauthenticatedError):
    """A token was shown, and is not known. Only this one may be a guess: whoever shows none has made none."""


class AuthenticatedClient:
    """One admission. `rights` is None where everything is allowed."""

    __slots__ = ("_admitted", "_end", "_on_revoked", "rights")

    def __init__(self, rights: Rights | None, admitted: _Admitted | None) -> None:
        self.rights: Final = rights
        self._admitted = admitted  # None: it has left, or was never asked for a token
        self._on_revoked: Callable[[RunnelError], object] | None = None
        self._end: RunnelError | None = None

    @property
    def name(self) -> str:
        """The token's, for people; empty where nobody has to show one."""
        return "" if self.rights is None else self.rights.name

    @property
    def why_over(self) -> RunnelError | None:
        """What `on_revoked` tells, once it is so, for those who look now and then."""
        return self._end

    def on_revoked(self, react: Callable[[RunnelError], object]) -> None:
        """Call this, once, when the token is no longer known, or has other rights from now on.

        UnauthenticatedError: it was revoked, and coming again would not help. ClosedError: coming again does.
        """
        if self._admitted is None:
            return
        self._on_revoked = react
        if self._end is not None:
            self.revoke(self._end)

    def revoke(self, error: RunnelError) -> None:
        """For the authenticator to say."""
        self._end = error
        react, self._on_revoked = self._on_revoked, None
        if react is not None:
            react(error)

    def leave(self) -> None:
        """It is over. Again: nothing."""
        self._on_revoked = None
        if self._admitted is not None:
            self._admitted.passes.discard(self)
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
    """A token that is known, and who is inside with it."""

    def __init__(self, token: Token) -> None:
        self.token: Final = token
        self.rights: Final = Rights(
            token.name, [Grant.parse(text) for text in token.allow], token.quotas
        )
        self.passes: set[AuthenticatedClient] = set()


_FREE: Final = AuthenticatedClient(None, None)


class Authenticator:
    """Make one with `Authenticator.open`; `start` it within a loop, and `close` it after the doors."""

    def __init__(self, file: TokenFile | None, clock: Clock, connections_max: int) -> None:
        self._file = file  # None: nobody is asked
        self._clock = clock
        self._connections_max = connections_max
        self._stamp: object = None
        self._tokens: dict[str, Token] = {}
        self._admitted: dict[str, _Admitted] = {}
        self.on_token_ended: list[Callable[[Rights], object]] = []
        """Called with the rights of a token that is known no more, or has others now: for what outlives its passes."""
        self.on_token_changed: list[Callable[[TokenChange, str], object]] = []
        """Called for each token that was added, changed or revoked since the file was first read."""
        self._penalties = Penalties(clock)
        self._without = Penalties(clock, "no token was shown")
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, settings: Settings, clock: Clock) -> Authenticator:
        """SettingsError says why the tokens cannot be read."""
        security = settings.security
        if security.authentication is Authentication.NONE:
            if _has_quotas(security):
                logger.warning(
                    "the quotas of security.token_… limit nobody: no client is asked for a token",
                    authentication="none",
                )
            return cls(None, clock, security.token_connections_max)
        authenticator = cls(TokenFile(tokens_path(settings)), clock, security.token_connections_max)
        authenticator._read()
        if not authenticator._tokens:
            logger.warning(
                "nobody can come in: there is no token yet; `runnel token add NAME --allow RIGHT:PATTERN` "
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
        """Wrong tokens, and none, since the broker began."""
        return self._penalties.failure_count + self._without.failure_count

    def start(self) -> None:
        if self._file is not None:
            self._watching = asyncio.get_running_loop().create_task(
                self._watch(), name="runnel-tokens"
            )

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    def use(self, security: SecuritySettings) -> None:
        """Another limit of connections from now on; who is inside stays. The tokens are read again at once."""
        self._connections_max = security.token_connections_max
        if self._file is not None:
            self._stamp = None  # also where the file was written again without a new stamp
            self._look()

    # --- Admission ---

    def admit(self, token: str | None) -> AuthenticatedClient:
        """A pass for whoever shows this. UnauthenticatedError: await `penalty` before it is answered."""
        if self._file is None:
            return _FREE
        self._look()
        if token is None:
            raise UnauthenticatedError(_NEEDED)
        found = find(self._tokens, token)
        if found is None:
            raise WrongTokenError("the token is not known here: it was revoked, or mistyped")
        admitted = self._admitted.get(found.id)
        if admitted is None:
            admitted = self._admitted[found.id] = _Admitted(found)
        count_max = found.connections_max or self._connections_max
        if len(admitted.passes) >= count_max:
            raise LimitExceededError(
                f"token {found.name!r} has {count_max} connections or calls under way; no more are allowed"
            )
        given = AuthenticatedClient(admitted.rights, admitted)
        admitted.passes.add(given)
        return given

    async def penalty(self, error: UnauthenticatedError, address: str) -> None:
        """Before this is answered. After a wrong token: the longer, the more of them came from there lately."""
        if isinstance(error, WrongTokenError):
            await self._penalties.wait(address)
        else:
            self._without.note(address)

    # --- The file ---

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(_WATCH_SECONDS)
            try:
                self._look()
            except Exception:
                # A bug: but whoever watches no more would let revoked tokens stay.
                logger.exception("the tokens could not be looked at")

    def _look(self) -> None:
        """Read the file again if it was changed. One that cannot be read leaves everything as it was."""
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
        stamp = self._file.stamp()  # first: whatever replaces it from here on has another one
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
        what = "a token was revoked" if is_revoked else "a token was changed"
        logger.info(what, token=name, ended=len(admitted.passes))
        for react in self.on_token_ended:
            react(admitted.rights)
        for each in list(admitted.passes):
            try:
                each.revoke(error)
            except Exception:
                # One door's mistake must not keep another connection of the token alive.
                logger.exception("a connection could not be told that its token is over")


def _has_quotas(security: SecuritySettings) -> bool:
    """Whether a quota was set that would not be there by default."""
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
    """Where the file is. SettingsError: a broker in memory has no directory for one."""
    if settings.security.tokens_file is not None:
        return Path(settings.security.tokens_file)
    if settings.data == IN_MEMORY:
        raise SettingsError(
            'data = "memory:" has no directory for tokens.json: set security.tokens_file as well'
        )
    return Path(settings.data) / "tokens.json"
