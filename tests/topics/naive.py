"""A deliberately naive twin of the pattern matcher: slow and obvious."""

from __future__ import annotations


def naive_matches(pattern: str, name: str) -> bool:
    """Whether a well-formed pattern matches a name, by trying everything."""
    if name.startswith("!") and not pattern.startswith("!"):
        return False
    # reached[i]: the part of the pattern read so far can describe the first i characters.
    reached = {0}
    rest = pattern
    while rest:
        if rest[0] == "*":
            reached = {end for start in reached for end in range(start, len(name) + 1)}
            rest = rest[1:]
            continue
        if rest[0] == "?":
            wanted, rest = None, rest[1:]
        elif rest[0] == "[":
            inside, _, rest = rest[1:].partition("]")
            wanted = inside
        else:
            wanted, rest = rest[0], rest[1:]
            reached = {i + 1 for i in reached if i < len(name) and name[i] == wanted}
            continue
        reached = {i + 1 for i in reached if i < len(name) and _in_set(wanted, name[i])}
    return len(name) in reached


def _in_set(inside: str | None, character: str) -> bool:
    if inside is None:
        return True
    negated = inside.startswith("!")
    members = inside[1:] if negated else inside
    found = False
    while members:
        if len(members) >= 3 and members[1] == "-":
            found = found or members[0] <= character <= members[2]
            members = members[3:]
        else:
            found = found or members[0] == character
            members = members[1:]
    return found is not negated
