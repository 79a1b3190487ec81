"""`runnel token`: edits the file of tokens that the settings name, whether a broker runs or not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from runnel.cli.options import DefaultCommandGroup, Json
from runnel.cli.render.tables import Table, json_text, printable
from runnel.cli.render.times import format_time
from runnel.cli.settings_options import Assignments, Config, Data, flags_of
from runnel.config import Authentication, Settings, load, parse_size
from runnel.errors import ClientFault
from runnel.log.segments.paths import FORMAT_FILE
from runnel.security.authenticator import tokens_path
from runnel.security.rights import Grant, TokenQuotas
from runnel.security.tokens import Token, TokenFile, check_grants, new_token

app = typer.Typer(cls=DefaultCommandGroup, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RIGHT:PATTERN",
        help="Grant a right (publish, read, consume, admin) on the topics of a pattern. Repeatable.",
    ),
]
ConnectionsMax = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Maximum number of connections and running calls at a time. "
        "[security.token_connections_max]",
    ),
]


Quotas = Annotated[
    list[str] | None,
    typer.Option(
        "--quota",
        metavar="NAME=N",
        help="Set a quota of this token, in place of security.token_NAME: topics_max, cursors_max,"
        " subscriptions_max, bytes_in_per_s, messages_in_per_s, bytes_out_per_s, "
        "messages_out_per_s. 0: no limit. Repeatable.",
    ),
]


@app.callback()
def _token() -> None:
    """Make, list, change and revoke tokens. Without a command: list.

    A broker with security.authentication = "token" accepts clients that present one of these tokens. It applies
    changes at once. The file contains hashes only: a token is shown when it is made, and never again.
    """


@app.command()
def add(
    name: Name,
    *,
    allow: Allow = None,
    connections_max: ConnectionsMax = None,
    quota: Quotas = None,
    config: Config = None,
    data: Data = None,
    assignments: Assignments = None,
) -> None:
    """Make a token and print it: runnel token add gateway --allow publish:sensors/* --allow read:commands/*

    `*` does not match topics that begin with `!`. A right on those must name them, such as read:!system/*.
    """
    settings = _settings(config, data, assignments)
    grants = _grants(allow)
    token, text = new_token(
        name,
        grants,
        now_ns=time.time_ns(),
        connections_max=connections_max,
        quotas=_quotas(quota),
    )
    file = _file(settings)
    with file.changing() as tokens:
        if any(known.name == name for known in tokens):
            raise ClientFault(
                f"there is a token {name!r} already: revoke it first, give this one another name, or give "
                "that one other rights (`runnel token change`)"
            )
        tokens.append(token)
    typer.echo(text)
    _tell(
        "This is the only time that it is shown. Clients and commands take it from the variable RUNNEL_TOKEN, "
        "programs as connect(token=…), HTTP as `Authorization: Bearer …`."
    )
    _tell_written(f"added {printable(name)}", file, settings)
    _tell_if_unused(settings)


@app.command("list")
def list_tokens(
    *,
    as_json: Json = False,
    config: Config = None,
    data: Data = None,
    assignments: Assignments = None,
) -> None:
    """List tokens with their names and rights. The tokens themselves are never shown."""
    settings = _settings(config, data, assignments)
    found = sorted(_file(settings).read(), key=lambda token: token.name)
    if as_json:
        documents = [_document(token) for token in found]
        typer.echo(json_text(documents))
    elif found:
        token_table(found).show()
    else:
        _tell("there are no tokens")
    _tell_if_unused(settings)


@app.command()
def change(
    name: Name,
    *,
    allow: Allow = None,
    connections_max: ConnectionsMax = None,
    quota: Quotas = None,
    config: Config = None,
    data: Data = None,
    assignments: Assignments = None,
) -> None:
    """Replace all rights and quotas of a token. The token itself stays the same.

    The broker closes its connections. Clients that connect again have the new rights.
    """
    settings = _settings(config, data, assignments)
    file = _file(settings)
    grants = _grants(allow)
    check_grants(name, grants)
    with file.changing() as tokens:
        at = _place_of(name, tokens, file.path)
        tokens[at] = msgspec.structs.replace(
            tokens[at],
            allow=tuple(map(str, grants)),
            connections_max=connections_max,
            quotas=_quotas(quota),
        )
    _tell_written(f"changed {printable(name)}", file, settings)


@app.command()
def revoke(
    name: Name, *, config: Config = None, data: Data = None, assignments: Assignments = None
) -> None:
    """Revoke a token: the broker closes its connections at once and refuses it from then on."""
    settings = _settings(config, data, assignments)
    file = _file(settings)
    with file.changing() as tokens:
        del tokens[_place_of(name, tokens, file.path)]
    _tell_written(f"revoked {printable(name)}", file, settings)


def token_table(tokens: Sequence[Token]) -> Table:
    """One row for each right and quota. The column of quotas is shown if a token has any."""
    rows: list[tuple[str, ...]] = []
    for token in tokens:
        shown_name = token.name
        most = "" if token.connections_max is None else f"{token.connections_max:,}"
        made = f"{format_time(token.made_ns)[:19]}Z"
        given = {} if token.quotas is None else msgspec.structs.asdict(token.quotas)
        quotas = [f"{name}={value}" for name, value in given.items() if value is not None]
        for allowed, quota in zip_longest(token.allow or ("nothing",), quotas, fillvalue=""):
            rows.append((shown_name, allowed, most, made, quota))
            shown_name = most = made = ""
    columns = ("token", "allowed", "connections", "made", "quotas")
    shown = len(columns) if any(row[-1] for row in rows) else len(columns) - 1
    return Table(
        columns[:shown], [row[:shown] for row in rows], numbers=frozenset(("connections",))
    )


def _document(token: Token) -> dict[str, object]:
    return {
        "name": token.name,
        "id": token.id,
        "allow": list(token.allow),
        "connections_max": token.connections_max,
        "quotas": token.quotas or {},
        "made": format_time(token.made_ns),
        "made_ns": token.made_ns,
    }


def _settings(config: str | None, data: str | None, assignments: Sequence[str] | None) -> Settings:
    return load(config_path=config, flags=flags_of(assignments, data)).settings


def _file(settings: Settings) -> TokenFile:
    return TokenFile(tokens_path(settings))


def _grants(allow: Sequence[str] | None) -> list[Grant]:
    return list(dict.fromkeys(map(Grant.parse, allow or ())))


def _quotas(given: Sequence[str] | None) -> TokenQuotas | None:
    if not given:
        return None
    values: dict[str, int] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or name not in TokenQuotas.__struct_fields__:
            raise ClientFault(
                f"{text!r} is not a quota: NAME=N, where NAME is one of "
                f"{', '.join(TokenQuotas.__struct_fields__)}, as topics_max=1000"
            )
        try:
            values[name] = parse_size(value) if name.startswith("bytes") else int(value)
        except ValueError as error:
            problem = str(error) if name.startswith("bytes") else "not a whole number"
            raise ClientFault(f"quota {text!r}: {problem}") from None
    return TokenQuotas(**values)


def _place_of(name: str, tokens: Sequence[Token], path: Path) -> int:
    for place, token in enumerate(tokens):
        if token.name == name:
            return place
    raise ClientFault(
        f"there is no token {name!r} in {path}; `runnel token list` has all there are"
    )


def _tell(text: str) -> None:
    """Print on standard error: standard output is for programs."""
    typer.echo(text, err=True)


def _tell_written(what: str, file: TokenFile, settings: Settings) -> None:
    """Print which file was changed: a broker that reads another file does not see the change."""
    path = file.path.absolute()
    _tell(f"{what} in {printable(str(path))}")
    if settings.security.tokens_file is None and not (path.parent / FORMAT_FILE).exists():
        _tell(
            f"note: {printable(str(path.parent))} is no data directory of a broker yet; one that has its data "
            "elsewhere does not see this: give the --data, --config or --set that it was started with"
        )


def _tell_if_unused(settings: Settings) -> None:
    if settings.security.authentication is Authentication.NONE:
        _tell(
            'note: by these settings nobody is asked for a token; security.authentication = "token" changes that'
        )
