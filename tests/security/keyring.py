"""A file of tokens in a test's hands: tokens are made, changed and revoked as `runnel token` does it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runnel.config import Authentication, SecuritySettings, Settings
from runnel.security.rights import Grant
from runnel.security.tokens import TokenFile, new_token


class Keyring:
    """Tokens by their names."""

    def __init__(self, directory: Path) -> None:
        self.file = TokenFile(directory / "tokens.json")
        self.texts: dict[str, str] = {}

    def settings(self, base: Settings | None = None, *, connections_max: int = 1000) -> Settings:
        """Settings of a broker that asks for one of these tokens."""
        security = SecuritySettings(
            authentication=Authentication.TOKEN,
            tokens_file=str(self.file.path),
            token_connections_max=connections_max,
        )
        return msgspec.structs.replace(base or Settings(), security=security)

    def add(self, name: str, *allow: str, connections_max: int | None = None) -> str:
        """The text of a new token."""
        grants = [Grant.parse(text) for text in allow]
        token, text = new_token(name, grants, now_ns=1, connections_max=connections_max)
        with self.file.changing() as tokens:
            tokens.append(token)
        self.texts[name] = text
        return text

    def change(self, name: str, *allow: str) -> None:
        with self.file.changing() as tokens:
            for at, token in enumerate(tokens):
                if token.name == name:
                    tokens[at] = msgspec.structs.replace(token, allow=allow)

    def revoke(self, name: str) -> None:
        with self.file.changing() as tokens:
            tokens[:] = [token for token in tokens if token.name != name]

    @property
    def secrets(self) -> list[str]:
        """What must be seen nowhere."""
        return [text.split("_", 2)[2] for text in self.texts.values()]
