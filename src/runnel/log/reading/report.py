"""The report of an offline read: skipped damage, tails that are not served, removed files."""

from __future__ import annotations

from typing import Final

import msgspec

from runnel.log.segments.scan import Damage

_KEPT_MAX: Final = 1000


class Withheld(msgspec.Struct, frozen=True):
    """The end of a segment that a broker is writing: not known to be synced yet, so not served."""

    path: str
    position: int
    size: int

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.position}: {self.size} bytes are being written and not known to be "
            "synced; not served"
        )


class Report:
    """What a read has found. Each place of damage is listed once, and at most a thousand of them."""

    def __init__(self) -> None:
        self.damage_count = 0
        self.torn: list[str] = []  # tails that a crash left
        self.withheld: list[Withheld] = []
        self.gone: list[str] = []  # removed by retention before they could be read
        self._damage: dict[tuple[str, int], Damage] = {}
        self._seen: set[object] = set()

    @property
    def damage(self) -> list[Damage]:
        return list(self._damage.values())

    def add_damage(self, *found: Damage) -> None:
        for damage in found:
            place = (damage.path, damage.position)
            if place not in self._damage:
                self.damage_count += 1
                if len(self._damage) < _KEPT_MAX:
                    self._damage[place] = damage

    def add_torn(self, torn: Damage) -> None:
        if self._is_new(torn):
            self.torn.append(torn_note(torn))

    def add_withheld(self, withheld: Withheld) -> None:
        if self._is_new(withheld.path):
            self.withheld.append(withheld)

    def add_gone(self, path: str) -> None:
        if self._is_new(("gone", path)):
            self.gone.append(path)

    def _is_new(self, thing: object) -> bool:
        if thing in self._seen or len(self._seen) >= _KEPT_MAX:
            return False
        self._seen.add(thing)
        return True


def torn_note(torn: Damage) -> str:
    """The text of a torn tail that is only read: recovery's text says that it was cut."""
    problem = torn.problem.replace("torn tail cut", "torn tail")
    return f"{torn.path}:{torn.position}: {problem}; the next start cuts it off"
