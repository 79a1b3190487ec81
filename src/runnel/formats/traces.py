"""W3C trace context: checks a `traceparent` and a `tracestate`, and makes them tags of a message. Pure.

    traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
                 version, trace id, parent id, flags; lower-case hexadecimal

Both come from untrusted senders. A value that does not follow the recommendation (Trace Context, level 1) is ignored,
as the recommendation asks; the message is never refused for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

# The recommendation asks to pass on at least 512 characters and 32 members.
_STATE_CHARACTERS_MAX: Final = 512
_STATE_MEMBERS_MAX: Final = 32
# A higher version may have more behind its flags, after another dash.
_PARENT_CHARACTERS_MAX: Final = 255

_PARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?P<more>-[!-~]*)?"
)
# A key, perhaps `tenant@system`; a value of printable ASCII without comma and equals sign, no blank at its end.
_STATE_MEMBER: Final = re.compile(
    r"(?P<key>[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)


def is_traceparent(text: str) -> bool:
    """Whether it names a trace and a parent. Only a version above 00 may have more than four parts."""
    if len(text) > _PARENT_CHARACTERS_MAX:
        return False
    found = _PARENT.fullmatch(text)
    return found is not None and (found["more"] is None or not text.startswith("00"))


def is_tracestate(text: str) -> bool:
    """Whether it is a list of members, `key=value`, each key once. Empty members between commas are allowed."""
    if not text or len(text) > _STATE_CHARACTERS_MAX:
        return False
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    keys = [found["key"] for member in members if (found := _STATE_MEMBER.fullmatch(member))]
    return 0 < len(members) == len(set(keys)) == len(keys) and len(members) <= _STATE_MEMBERS_MAX


def trace_tags(
    traceparent: str | None, tracestate: str | None, tags: Mapping[str, str] | None
) -> Mapping[str, str] | None:
    """The tags of a message, with the trace context of the request that brought it.

    A message that has its own `traceparent` keeps it, and gets no state of another trace. A state without a parent
    means nothing.
    """
    if traceparent is None or not is_traceparent(traceparent):
        return tags
    if tags is not None and (TRACEPARENT in tags or TRACESTATE in tags):
        return tags
    added = {TRACEPARENT: traceparent}
    if tracestate is not None and is_tracestate(tracestate):
        added[TRACESTATE] = tracestate
    return added if tags is None else {**tags, **added}
