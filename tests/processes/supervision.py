"""Random histories of a supervisor and its children: crashes, hangs, slow starts, sleeping machines, signals.

The children are simulated too. Whatever they do, the promises of the supervisor hold, which `_History` checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from runnel.processes.supervisor import (
    AnnounceAll,
    EndSupervision,
    KillChild,
    ReapChild,
    StartChild,
    SupervisionRules,
    Supervisor,
    SupervisorAction,
    TellChild,
    ToldWord,
)
from tests.simulation.history import Outcome, Violation, run

MS = 1_000_000
SECOND = 1_000 * MS
RULES = SupervisionRules()
BEAT_NS = SECOND
# Lives of one child that may begin within 10 s: 100, 200, 400 … ms lie between them.
LIVES_IN_TEN_SECONDS_MAX = 9


@dataclass(slots=True)
class _Process:
    """A simulated process of a child: when it does what next."""

    life: int
    serves_ns: int
    ends_ns: int  # by itself
    hangs_ns: int  # from then on it does nothing more
    beats_ns: int
    exit_code: int
    drains_for_ns: int
    drains_ns: int | None = None  # when it ends after it was told to
    reloads_ns: int | None = None
    failure: tuple[str, str] | None = None
    is_serving: bool = False
    heard_ns: int = 0
    unforgiven_ns: int = (
        0  # of sleeps since then: a supervisor may miss two ticks and not see a sleep in it
    )


class _History:
    def __init__(self, seed: int, make: type[Supervisor]) -> None:
        self._random = random = Random(seed)
        self._count = random.randint(1, 4)
        self._supervisor = make(self._count, RULES)
        self._now_ns = random.randrange(1, 10**15)
        self._processes: dict[int, _Process] = {}
        self._lines: list[str] = []
        self._counts: Counter[str] = Counter()
        self._crashes = random.choice((0.0, 0.02, 0.2, 1.0))
        self._lasts_ms_max = random.choice((50, 20_000))  # how long a child lives that crashes
        self._hangs = random.choice((0.0, 0.0, 0.1))
        self._stops_ns = self._now_ns + random.randrange(1, 200) * SECOND
        self._stop_count = 0
        self._announced = False
        self._served: set[int] = set()
        self._ended: EndSupervision | None = None
        self._starts: dict[int, list[int]] = {}
        self._waits_since: dict[int, int] = {}
        self._slept_ns = 0
        self._told_reload: Counter[int] = Counter()
        self._lived_through: set[int] | None = (
            None  # children that lived when a reload was asked for
        )

    def transcript(self, violation: Violation | None = None) -> Sequence[str]:
        return self._lines

    def counts(self) -> Mapping[str, int]:
        return self._counts

    # --- The run ---

    def run(self) -> None:
        begin_ns = self._now_ns
        self._do(self._supervisor.begin(self._now_ns))
        due_ns = self._supervisor.next_tick_ns()
        while self._ended is None:
            if self._now_ns - begin_ns > 2_000 * SECOND:
                raise Violation("it never ends")
            event_ns = min(
                [self._next_of(process) for process in self._processes.values()], default=due_ns
            )
            signal_ns = self._stops_ns if self._stop_count < 2 else due_ns
            self._now_ns = max(self._now_ns, min(due_ns, event_ns, signal_ns))
            if self._random.random() < 0.003:
                self._sleep()
            self._step_children()
            if self._ended is None and self._now_ns >= self._stops_ns and self._stop_count < 2:
                self._stop()
            if self._ended is None and self._now_ns >= due_ns:
                self._do(self._supervisor.tick(self._now_ns))
            if self._random.random() < 0.01 and self._lived_through is None:
                self._reload()
            self._check()
            due_ns = self._supervisor.next_tick_ns()
            if due_ns - self._now_ns > RULES.tick_ns:
                raise Violation("it looks too rarely")
        if self._processes:
            raise Violation("it ended while processes were running")

    def _sleep(self) -> None:
        """The machine sleeps: nobody runs, and the clock goes on."""
        self._slept_ns = self._random.randrange(1, 100) * SECOND
        self._line(f"sleeps for {self._slept_ns / SECOND:g} s")
        self._now_ns += self._slept_ns
        for process in self._processes.values():
            for name in ("serves_ns", "ends_ns", "hangs_ns", "beats_ns", "drains_ns", "reloads_ns"):
                value = getattr(process, name)
                setattr(process, name, None if value is None else value + self._slept_ns)
            process.heard_ns += self._slept_ns
            process.unforgiven_ns += min(self._slept_ns, 2 * RULES.tick_ns)
        self._waits_since = {
            number: since + self._slept_ns for number, since in self._waits_since.items()
        }
        self._counts["sleeps"] += 1

    def _stop(self) -> None:
        self._stop_count += 1
        self._stops_ns = self._now_ns + self._random.randrange(1, 90) * SECOND
        self._line("signal")
        self._lived_through = None
        self._do(self._supervisor.stop(self._now_ns))

    def _reload(self) -> None:
        self._line("reload")
        self._told_reload.clear()
        self._lived_through = set(self._processes)
        self._counts["reloads"] += 1
        self._do(self._supervisor.reload(self._now_ns))

    # --- Children ---

    def _next_of(self, process: _Process) -> int:
        times = [process.ends_ns]
        if self._now_ns < process.hangs_ns:
            times += [process.beats_ns, process.hangs_ns]
            times += [] if process.is_serving else [process.serves_ns]
            times += [] if process.drains_ns is None else [process.drains_ns]
            times += [] if process.reloads_ns is None else [process.reloads_ns]
        return min(times)

    def _step_children(self) -> None:
        now_ns, supervisor = self._now_ns, self._supervisor
        for number, process in list(self._processes.items()):
            life = process.life
            if now_ns < process.hangs_ns:
                if now_ns >= process.beats_ns:
                    process.beats_ns = now_ns + BEAT_NS
                    process.heard_ns, process.unforgiven_ns = now_ns, 0
                    supervisor.heard(number, life, now_ns)
                if not process.is_serving and now_ns >= process.serves_ns:
                    process.is_serving = True
                    process.heard_ns, process.unforgiven_ns = now_ns, 0
                    self._served.add(number)
                    self._waits_since.pop(number, None)
                    self._do(supervisor.serves(number, life, now_ns))
                if process.reloads_ns is not None and now_ns >= process.reloads_ns:
                    process.reloads_ns = None
                    self._do(supervisor.reloaded(number, life, now_ns))
                if process.drains_ns is not None and now_ns >= process.drains_ns:
                    self._end(number, 0)
                    continue
            if now_ns >= process.ends_ns:
                if process.failure is not None:
                    supervisor.failed(number, life, process.failure)
                self._end(number, process.exit_code)

    def _end(self, number: int, exit_code: int) -> None:
        process = self._processes.pop(number)
        self._line(f"{number} ends with {exit_code}")
        self._counts["ends"] += 1
        if self._lived_through is not None:
            self._lived_through.discard(number)
        self._waits_since[number] = self._now_ns
        actions = self._supervisor.ended(number, process.life, exit_code, self._now_ns)
        if not any(isinstance(action, ReapChild) for action in actions):
            raise Violation(f"{number} is not reaped")
        self._do(actions)

    def _new(self, life: int) -> _Process:
        random, now_ns = self._random, self._now_ns
        # Children that crash at once would end everything before all of them have served.
        may_crash = self._announced or self._lasts_ms_max > 1_000
        crashes = may_crash and random.random() < self._crashes
        hangs = random.random() < self._hangs
        never_ns = now_ns + 10**18
        return _Process(
            life=life,
            serves_ns=now_ns + random.randrange(1, 5_000) * MS,
            ends_ns=now_ns + random.randrange(1, self._lasts_ms_max) * MS if crashes else never_ns,
            hangs_ns=now_ns + random.randrange(1, 60_000) * MS if hangs else never_ns,
            beats_ns=now_ns + 500 * MS,
            exit_code=random.choice((0, 1, -9, -11)),
            drains_for_ns=random.choice((100 * MS, 2 * SECOND, 40 * SECOND, 10**17)),
            failure=("settings", "wrong") if random.random() < 0.01 else None,
            heard_ns=now_ns,
        )

    # --- What the supervisor does, and whether it may ---

    def _do(self, actions: Sequence[SupervisorAction]) -> None:
        for action in actions:
            self._line(str(action))
            match action:
                case StartChild(number, life):
                    self._start(number, life)
                case KillChild(number):
                    self._kill(number)
                case TellChild(number, word):
                    self._tell(number, word)
                case ReapChild(number):
                    if number in self._processes:
                        raise Violation(f"{number} is reaped alive")
                case AnnounceAll():
                    self._announce()
                case EndSupervision():
                    if self._ended is not None:
                        raise Violation("it ends twice")
                    self._ended = action

    def _start(self, number: int, life: int) -> None:
        if number in self._processes:
            raise Violation(f"{number} has a process already")
        if self._stop_count:
            raise Violation(f"{number} is started after the signal to end")
        starts = self._starts.setdefault(number, [])
        starts.append(self._now_ns)
        if sum(start > self._now_ns - 10 * SECOND for start in starts) > LIVES_IN_TEN_SECONDS_MAX:
            raise Violation(f"{number} is started again and again")
        self._processes[number] = self._new(life)
        self._counts["starts"] += 1

    def _kill(self, number: int) -> None:
        process = self._processes.get(number)
        if process is None:
            raise Violation(f"{number} is killed and has no process")
        silent_ns = self._now_ns - process.heard_ns + process.unforgiven_ns
        if not self._stop_count and silent_ns < RULES.silence_ns_max:
            raise Violation(f"{number} is killed although it sends heartbeats")
        process.exit_code = -9
        process.failure = None
        process.ends_ns = self._now_ns
        self._counts["kills"] += 1

    def _tell(self, number: int, word: ToldWord) -> None:
        process = self._processes.get(number)
        if process is None:
            raise Violation(f"{number} is told something and has no process")
        match word:
            case ToldWord.RELOAD:
                if any(other.reloads_ns is not None for other in self._processes.values()):
                    self._counts["overlapping reloads"] += 1
                process.reloads_ns = self._now_ns + self._random.randrange(1, 5_000) * MS
                self._told_reload[number] += 1
            case ToldWord.DRAIN:
                process.drains_ns = self._now_ns + process.drains_for_ns
            case ToldWord.HURRY:
                quick_ns = self._random.choice((100 * MS, 10**17))
                process.drains_ns = self._now_ns + min(process.drains_for_ns, quick_ns)

    def _announce(self) -> None:
        if self._announced:
            raise Violation("it announces twice")
        if self._stop_count or len(self._served) < self._count:
            raise Violation("it announces what does not serve")
        self._announced = True
        self._counts["announced"] += 1

    def _check(self) -> None:
        """What has to have happened by now."""
        limit_ns = 2 * RULES.tick_ns + SECOND // 100
        for number, process in self._processes.items():
            silent_ns = self._now_ns - process.heard_ns
            silent_ns_max = (
                RULES.silence_ns_max if process.is_serving else RULES.starting_silence_ns_max
            )
            if silent_ns > silent_ns_max + limit_ns + process.unforgiven_ns:
                raise Violation(f"{number} is silent and lives")
        if self._stop_count == 0:
            for number, since_ns in self._waits_since.items():
                is_late = self._now_ns - since_ns > RULES.delay_ns_max + limit_ns
                if number not in self._processes and is_late and self._announced:
                    raise Violation(f"{number} is not started again")
        lived = self._lived_through
        if lived is not None:
            if any(self._told_reload[number] > 1 for number in lived):
                raise Violation("a child is told to reload twice")
            if all(self._told_reload[number] for number in lived):
                self._lived_through = None

    def _line(self, text: str) -> None:
        self._lines.append(f"{self._now_ns / SECOND:.3f} {text}")


def run_history(seed: int, make: type[Supervisor] = Supervisor) -> Outcome:
    """Run one history. HistoryFailed if a promise was broken."""
    replay = f"run_history({seed}) of tests/processes/supervision.py"
    return run(_History(seed, make), seed, replay)
