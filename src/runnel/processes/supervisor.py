"""Supervises child processes: when each is started, told to end, or killed. Pure: events and the time in, actions out.

Each child is started again when it ends, after a delay that grows while it keeps ending. A child that sends no
heartbeat is killed. Until all children have served once, a child that says why it cannot start ends everything: its
settings are those of all the others.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

_NS_PER_MS: Final = 1_000_000
_NS_PER_SECOND: Final = 1_000_000_000


class SupervisionRules(msgspec.Struct, frozen=True, kw_only=True):
    """The times of supervision."""

    silence_ns_max: int = 10 * _NS_PER_SECOND
    """A child that serves and sends no heartbeat for so long is killed."""
    starting_silence_ns_max: int = 60 * _NS_PER_SECOND
    """The same for a child that does not serve yet: imports and large catalogues hold up its heartbeats."""
    delay_ns_min: int = 100 * _NS_PER_MS
    delay_ns_max: int = 30 * _NS_PER_SECOND
    """Before a child is started again; it doubles with each life that was not `stable_ns` long."""
    stable_ns: int = 60 * _NS_PER_SECOND
    first_lives_max: int = 5
    """Lives of one child before all have served once. Beyond it a crash at the start ends everything."""
    drain_ns_max: int = 60 * _NS_PER_SECOND
    """Children that have not ended so long after they were told to are killed."""
    hurry_ns_max: int = 10 * _NS_PER_SECOND
    """The same after a second signal."""
    reload_ns_max: int = 30 * _NS_PER_SECOND
    """How long one child may take to read its settings before the next one is told."""
    tick_ns: int = 500 * _NS_PER_MS
    """How often `tick` is called. If it comes much later, the machine slept, and silence meant nothing."""


class ChildPhase(enum.Enum):
    """What a child is doing."""

    STARTING = "starting"  # its process runs and does not serve yet
    SERVING = "serving"
    WAITING = "waiting"  # it has no process until its next start
    ENDED = "ended"  # it has no process, and gets none any more


class ChildLife(msgspec.Struct):
    """One child. Its `life` counts its processes; what is heard of an earlier life counts for nothing."""

    number: int
    phase: ChildPhase = ChildPhase.WAITING
    life: int = 0
    began_ns: int = 0
    heard_ns: int = 0
    restart_ns: int = 0
    short_lives: int = 0
    failure: tuple[str, str] | None = None  # the code and text of the error that it ended with
    is_killed: bool = False

    @property
    def has_process(self) -> bool:
        return self.phase in (ChildPhase.STARTING, ChildPhase.SERVING)


class StartChild(msgspec.Struct, frozen=True):
    """Start a process."""

    number: int
    life: int


class ToldWord(enum.Enum):
    """What children are told."""

    DRAIN = "drain"  # finish accepted requests and end
    HURRY = "hurry"  # end without waiting for clients
    RELOAD = "reload"  # take other settings


class TellChild(msgspec.Struct, frozen=True):
    """Send a word to a child."""

    number: int
    word: ToldWord


class KillChild(msgspec.Struct, frozen=True):
    """SIGKILL."""

    number: int
    why: str


class ReapChild(msgspec.Struct, frozen=True):
    """Its process has ended: the other nodes may take its shards. Its next one starts after `restart_in_ns`."""

    number: int
    exit_code: int
    is_expected: bool
    restart_in_ns: int | None
    failure: tuple[str, str] | None


class AnnounceAll(msgspec.Struct, frozen=True):
    """All children serve, for the first time."""


class EndSupervision(msgspec.Struct, frozen=True):
    """All children have ended for good. `failure` is the code and text of the error to end with."""

    exit_code: int
    failure: tuple[str, str] | None


SupervisorAction = StartChild | TellChild | KillChild | ReapChild | AnnounceAll | EndSupervision


class Supervisor:
    """The state of all children. Children are numbered from 1 on."""

    def __init__(self, count: int, rules: SupervisionRules | None = None) -> None:
        self._rules: Final = rules or SupervisionRules()
        self.children: Final = {number: ChildLife(number) for number in range(1, count + 1)}
        self._looked_ns = 0
        self._has_announced = False
        self._is_stopping = False
        self._kill_ns: int | None = (
            None  # while stopping: when the children that are left are killed
        )
        self._failure: tuple[str, str] | None = None
        self._exit_code = 0
        self._is_over = False
        self._to_reload: list[
            tuple[int, int]
        ] = []  # children by number and life; the first one is at it
        self._reload_until_ns = 0

    # --- What happens ---

    def begin(self, now_ns: int) -> Sequence[SupervisorAction]:
        self._looked_ns = now_ns
        return [self._start(child, now_ns) for child in self.children.values()]

    def heard(self, number: int, life: int, now_ns: int) -> None:
        """A message of this child has come, whatever it says."""
        child = self._living(number, life)
        if child is not None:
            child.heard_ns = now_ns

    def serves(self, number: int, life: int, now_ns: int) -> Sequence[SupervisorAction]:
        """The child serves clients from now on."""
        child = self._living(number, life)
        if child is None:
            return []
        child.heard_ns = now_ns
        child.phase = ChildPhase.SERVING
        is_all = all(each.phase is ChildPhase.SERVING for each in self.children.values())
        if self._has_announced or self._is_stopping or not is_all:
            return []
        self._has_announced = True
        return [AnnounceAll()]

    def failed(self, number: int, life: int, failure: tuple[str, str]) -> None:
        """The child said that it ends with this error."""
        child = self._living(number, life)
        if child is not None:
            child.failure = failure

    def ended(
        self, number: int, life: int, exit_code: int, now_ns: int
    ) -> Sequence[SupervisorAction]:
        """The child's process has ended, or could not be started."""
        child = self._living(number, life)
        if child is None:
            return []
        failure, is_first = child.failure, not self._has_announced
        is_stable = now_ns - child.began_ns >= self._rules.stable_ns
        child.short_lives = 1 if is_stable else child.short_lives + 1
        gives_up = is_first and (
            failure is not None or child.short_lives >= self._rules.first_lives_max
        )
        if self._is_stopping or gives_up:
            child.phase = ChildPhase.ENDED
            actions: list[SupervisorAction] = [
                ReapChild(number, exit_code, self._is_stopping, None, failure)
            ]
            if self._is_stopping and exit_code != 0:
                self._exit_code = self._exit_code or 1
            if not self._is_stopping:
                self._failure = failure
                self._exit_code = 1
                actions += self._drain_all(now_ns)
            return [*actions, *self._next_reload(now_ns), *self._end_if_all_have()]
        delay_ns = self._delay_ns(child.short_lives)
        child.phase, child.restart_ns = ChildPhase.WAITING, now_ns + delay_ns
        reaped = ReapChild(number, exit_code, False, delay_ns, failure)  # noqa: FBT003 - a struct's field
        return [reaped, *self._next_reload(now_ns)]

    def stop(self, now_ns: int) -> Sequence[SupervisorAction]:
        """SIGTERM has come. All children drain together; the second time they hurry."""
        if self._kill_ns is not None:
            self._kill_ns = min(self._kill_ns, now_ns + self._rules.hurry_ns_max)
            return self._tell_all(ToldWord.HURRY)
        return [*self._drain_all(now_ns), *self._end_if_all_have()]

    def reload(self, now_ns: int) -> Sequence[SupervisorAction]:
        """The settings have changed: the children read them one after the other."""
        self._to_reload = [(child.number, child.life) for child in self._with_process()]
        return self._tell_reload(now_ns)

    def reloaded(self, number: int, life: int, now_ns: int) -> Sequence[SupervisorAction]:
        """The child has read its settings."""
        if self._to_reload[:1] != [(number, life)]:
            return []
        del self._to_reload[0]
        return self._tell_reload(now_ns)

    def tick(self, now_ns: int) -> Sequence[SupervisorAction]:
        """Look at everything that is due."""
        self._forgive_sleep(now_ns)
        actions: list[SupervisorAction] = []
        for child in self.children.values():
            if child.phase is ChildPhase.WAITING and now_ns >= child.restart_ns:
                actions.append(self._start(child, now_ns))
            elif child.has_process and not child.is_killed:
                why = self._why_killed(child, now_ns)
                if why is not None:
                    child.is_killed = True
                    actions.append(KillChild(child.number, why))
        if self._to_reload and now_ns >= self._reload_until_ns:
            del self._to_reload[0]
            actions += self._tell_reload(now_ns)
        return actions

    def next_tick_ns(self) -> int:
        """When `tick` should be called next. Whatever else happens does not put it off."""
        waiting = [
            child.restart_ns
            for child in self.children.values()
            if child.phase is ChildPhase.WAITING
        ]
        return min([self._looked_ns + self._rules.tick_ns, *waiting])

    # --- Decisions ---

    def _living(self, number: int, life: int) -> ChildLife | None:
        child = self.children[number]
        return child if child.life == life and child.has_process else None

    def _with_process(self) -> Iterable[ChildLife]:
        return [child for child in self.children.values() if child.has_process]

    def _start(self, child: ChildLife, now_ns: int) -> StartChild:
        child.phase = ChildPhase.STARTING
        child.life += 1
        child.began_ns = child.heard_ns = now_ns
        child.failure = None
        child.is_killed = False
        return StartChild(child.number, child.life)

    def _delay_ns(self, short_lives: int) -> int:
        doublings = min(short_lives - 1, 32)
        return min(self._rules.delay_ns_min << doublings, self._rules.delay_ns_max)

    def _why_killed(self, child: ChildLife, now_ns: int) -> str | None:
        is_serving = child.phase is ChildPhase.SERVING
        silence_ns_max = (
            self._rules.silence_ns_max if is_serving else self._rules.starting_silence_ns_max
        )
        if now_ns - child.heard_ns >= silence_ns_max:
            return f"it has sent no heartbeat for {silence_ns_max / _NS_PER_SECOND:g} s"
        if self._kill_ns is not None and now_ns >= self._kill_ns:
            return "it has not ended in time"
        return None

    def _forgive_sleep(self, now_ns: int) -> None:
        """Leave out the time in which this process did not run either."""
        slept_ns = now_ns - self._looked_ns - 2 * self._rules.tick_ns
        self._looked_ns = now_ns
        if slept_ns > 0:
            for child in self.children.values():
                child.heard_ns = min(now_ns, child.heard_ns + slept_ns)

    def _drain_all(self, now_ns: int) -> Sequence[SupervisorAction]:
        self._is_stopping = True
        self._kill_ns = now_ns + self._rules.drain_ns_max
        self._to_reload.clear()
        for child in self.children.values():
            if child.phase is ChildPhase.WAITING:
                child.phase = ChildPhase.ENDED
        return self._tell_all(ToldWord.DRAIN)

    def _tell_all(self, word: ToldWord) -> Sequence[SupervisorAction]:
        return [TellChild(child.number, word) for child in self._with_process()]

    def _tell_reload(self, now_ns: int) -> Sequence[SupervisorAction]:
        """Tell the first child in the queue that still has the process it had."""
        while self._to_reload and self._living(*self._to_reload[0]) is None:
            del self._to_reload[0]
        if not self._to_reload:
            return []
        self._reload_until_ns = now_ns + self._rules.reload_ns_max
        return [TellChild(self._to_reload[0][0], ToldWord.RELOAD)]

    def _next_reload(self, now_ns: int) -> Sequence[SupervisorAction]:
        """Go on if the child that reloads has ended."""
        if self._to_reload and self._living(*self._to_reload[0]) is None:
            return self._tell_reload(now_ns)
        return []

    def _end_if_all_have(self) -> Sequence[SupervisorAction]:
        if self._is_over or any(
            child.phase is not ChildPhase.ENDED for child in self.children.values()
        ):
            return []
        self._is_over = True
        return [EndSupervision(self._exit_code, self._failure)]
