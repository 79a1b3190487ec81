"""Decides which requests of web browsers are allowed, by their `Host`, `Origin` and `Sec-Fetch-Site`.

A browser sends requests for any page that its user visits. If the broker asks for no tokens, it refuses two kinds of
pages: pages of another site (the browser then sends `Origin` or `Sec-Fetch-Site`), and pages whose own name leads to
the broker (DNS rebinding: the browser then sends that name as `Host`). If the broker asks for tokens, it checks none
of this, because such a page has no token. Pages of `http.cors_origins` are allowed, and the answers tell browsers so
(CORS).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from runnel.config import HttpSettings
from runnel.errors import ClientFault, ForbiddenError, SettingsError
from runnel.platform.addresses import parse_address

Fields = Sequence[tuple[bytes, bytes]]

_HOST: Final = re.compile(
    rb"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)(?:%[0-9A-Za-z._~%-]+)?\]|(?P<name>[0-9A-Za-z._-]+))(?::[0-9]{1,5})?"
)
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[0-9a-z._-]+)(?::[0-9]{1,5})?")
_HOST_SETTING: Final = re.compile(r"(?:\*\.)?[0-9A-Za-z_-][0-9A-Za-z._-]*")
_HEADER_NAMES: Final = re.compile(rb"[0-9A-Za-z!#$%&'*+.^_`|~, -]{1,1024}")
_ANY: Final = "*"
_OWN_SITE: Final = (b"same-origin", b"none")  # the broker's own page; the user, without any page
_READING: Final = ("GET", "HEAD")
_METHODS: Final = b"GET, HEAD, POST, PUT, DELETE"
_PREFLIGHT_SECONDS: Final = b"600"
_KNOWN_HOSTS_MAX: Final = 100
_SHOWN_CHARS_MAX: Final = 100


class BrowserPolicy:
    """What the settings allow browsers to do. SettingsError: a setting contains an invalid origin or host."""

    def __init__(self, http: HttpSettings, *, asks_for_tokens: bool, machine: str) -> None:
        self._is_checking = not asks_for_tokens
        self._is_any_host = _ANY in http.hosts
        listening_on = parse_address(http.listen or "", key="http.listen")[0]
        self._names = {"localhost", listening_on.lower(), machine.lower()}
        self._suffixes = [".localhost"]
        for host in http.hosts:
            self._add_host(host.lower())
        # Hosts that have passed the check, as clients spell them.
        self._known_hosts: set[bytes] = set()
        for origin in http.cors_origins:
            _check_origin(origin, asks_for_tokens=asks_for_tokens)
        self._origins = frozenset(origin.encode() for origin in http.cors_origins)
        self._is_any_origin = _ANY.encode() in self._origins

    def _add_host(self, host: str) -> None:
        if host == _ANY:
            return
        if not _HOST_SETTING.fullmatch(host):
            raise SettingsError(
                f'http.hosts has "{host}", which is no name; write "broker.example" without scheme and port, '
                '"*.example" for all names below it, or "*" for any name'
            )
        if host.startswith("*."):
            self._suffixes.append(host[1:])
        else:
            self._names.add(host)

    def is_allowed_origin(self, origin: bytes) -> bool:
        """Whether `http.cors_origins` contains this origin."""
        return self._is_any_origin or origin in self._origins

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request that a web page may have caused and that the settings do not allow."""
        if not self._is_checking:
            return
        host = headers.get(b"host", b"")
        if host not in self._known_hosts:
            self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None:
            if self.is_allowed_origin(origin):
                return
            if not _is_same_origin(origin, host):
                raise ForbiddenError(
                    f"origin {shown(origin)} is another site than {shown(host)}: without tokens, only pages of the "
                    "sites in http.cors_origins may use the broker"
                )
        site = headers.get(b"sec-fetch-site")
        if site is None or site in _OWN_SITE:
            return
        # The user followed a link: the browser shows the answer to the user, and not to the page with the link.
        if method in _READING and headers.get(b"sec-fetch-mode") == b"navigate":
            return
        raise ForbiddenError(
            f"sec-fetch-site is {shown(site)}: a page of another site caused this request; without tokens, only pages "
            "of the sites in http.cors_origins may use the broker"
        )

    def _check_host(self, host: bytes) -> None:
        parts = _HOST.fullmatch(host)
        if parts is None and host:
            raise ClientFault(f"host {shown(host)} is not a host, or a host and a port")
        if not self._is_any_host and (parts is None or not self._is_own(parts)):
            raise ForbiddenError(
                f"host {shown(host)} is no name of this broker: without tokens it answers to IP addresses, localhost, "
                "the machine's name, and the name in http.listen, so that no web page comes in by a name of its own; "
                "add other names to http.hosts"
            )
        if len(self._known_hosts) < _KNOWN_HOSTS_MAX:
            self._known_hosts.add(host)

    def _is_own(self, parts: re.Match[bytes]) -> bool:
        if parts["ipv6"] is not None:
            return _is_address(ipaddress.IPv6Address, parts["ipv6"].decode())
        name = parts["name"].decode().lower()
        # Any address is allowed: DNS rebinding works with names only.
        return (
            name in self._names
            or name.endswith(tuple(self._suffixes))
            or _is_address(ipaddress.IPv4Address, name)
        )

    # --- CORS ---

    def cors_fields(self, origin: bytes | None) -> Fields:
        """Headers of every answer to an allowed page; none for other pages."""
        if origin is None or not self.is_allowed_origin(origin):
            return ()
        return (
            (b"access-control-allow-origin", b"*" if self._is_any_origin else origin),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"origin"),
        )


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks for permission before it sends the request itself."""
    return method == "OPTIONS" and b"access-control-request-method" in headers


def preflight_fields(headers: Mapping[bytes, bytes]) -> list[tuple[str, str]]:
    """Headers of the answer to a preflight of an allowed page, in addition to `cors_fields`."""
    fields = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", _PREFLIGHT_SECONDS),
    ]
    wanted = headers.get(b"access-control-request-headers", b"")
    if _HEADER_NAMES.fullmatch(wanted):
        fields.append((b"access-control-allow-headers", wanted))
    if headers.get(b"access-control-request-private-network") == b"true":
        fields.append((b"access-control-allow-private-network", b"true"))
    return [(name.decode(), value.decode()) for name, value in fields]


def shown(value: bytes) -> str:
    """A header's value as error messages quote it."""
    return repr(value[:_SHOWN_CHARS_MAX].decode("latin-1"))


def _check_origin(origin: str, *, asks_for_tokens: bool) -> None:
    if origin == _ANY:
        if not asks_for_tokens:
            raise SettingsError(
                'http.cors_origins has "*", and nobody is asked for a token: every web page that somebody on this '
                'network visits could use the broker. Name the origins, or set security.authentication = "token"'
            )
    elif not _ORIGIN.fullmatch(origin):
        raise SettingsError(
            f'http.cors_origins has "{origin}", which is no origin; write scheme, host and port in lower case, '
            'as browsers send them, such as "https://ui.example" or "http://localhost:3000", without a path'
        )


def _is_address(kind: type[ipaddress.IPv4Address | ipaddress.IPv6Address], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _is_same_origin(origin: bytes, host: bytes) -> bool:
    try:
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False
