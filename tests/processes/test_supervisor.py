"""The rules of supervision, one by one."""

from __future__ import annotations

from collections.abc import Sequence

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

MS = 1_000_000
SECOND = 1_000 * MS
RULES = SupervisionRules()
WRONG = ("settings", "tls_certificate is wrong")


def serving(count: int) -> Supervisor:
    """A supervisor at 0 ns all of whose children serve."""
    supervisor = Supervisor(count, RULES)
    assert supervisor.begin(0) == [StartChild(number, 1) for number in range(1, count + 1)]
    told = [supervisor.serves(number, 1, 0) for number in range(1, count + 1)]
    assert told == [*([[]] * (count - 1)), [AnnounceAll()]]
    return supervisor


def pass_time(
    supervisor: Supervisor, begin_ns: int, end_ns: int, beating: Sequence[int] = ()
) -> list[SupervisorAction]:
    """Everything that the supervisor does from `begin_ns` to `end_ns`, while these children send heartbeats."""
    done: list[SupervisorAction] = []
    now_ns = begin_ns
    while now_ns < end_ns:
        now_ns = min(end_ns, supervisor.next_tick_ns())
        for number in beating:
            supervisor.heard(number, supervisor.children[number].life, now_ns)
        done += supervisor.tick(now_ns)
    return done


def test_a_child_that_ends_is_started_again_after_a_delay_that_grows() -> None:
    supervisor = serving(2)
    now_ns = 0
    for life, delay_ns in enumerate((100, 200, 400, 800, 1_600), 1):
        reaped = ReapChild(1, -9, False, delay_ns * MS, None)
        assert supervisor.ended(1, life, -9, now_ns) == [reaped]
        assert pass_time(supervisor, now_ns, now_ns + delay_ns * MS - 1, [2]) == []
        now_ns += delay_ns * MS
        assert supervisor.tick(now_ns) == [StartChild(1, life + 1)]
    delays_ns = set()
    for life in range(6, 20):
        (last,) = supervisor.ended(1, life, 0, now_ns)
        assert isinstance(last, ReapChild)
        assert last.restart_in_ns is not None
        delays_ns.add(last.restart_in_ns)
        now_ns += last.restart_in_ns
        supervisor.heard(2, 1, now_ns)
        assert supervisor.tick(now_ns) == [StartChild(1, life + 1)]
    assert max(delays_ns) == RULES.delay_ns_max


def test_the_delay_is_short_again_after_a_long_life() -> None:
    supervisor = serving(2)
    for life in (1, 2, 3):
        supervisor.ended(1, life, 1, life * SECOND)
        pass_time(supervisor, life * SECOND, (life + 1) * SECOND, [2])
    later_ns = 4 * SECOND + RULES.stable_ns
    pass_time(supervisor, 4 * SECOND, later_ns, [1, 2])
    assert supervisor.ended(1, 4, 1, later_ns) == [ReapChild(1, 1, False, 100 * MS, None)]


def test_a_silent_child_is_killed_once() -> None:
    supervisor = serving(2)
    silence_ns_max = RULES.silence_ns_max
    assert pass_time(supervisor, 0, silence_ns_max - 1, [2]) == []
    assert pass_time(supervisor, silence_ns_max - 1, 5 * silence_ns_max, [2]) == [
        KillChild(1, "it has sent no heartbeat for 10 s")
    ]


def test_a_child_that_starts_may_be_silent_for_longer() -> None:
    supervisor = Supervisor(1, RULES)
    supervisor.begin(0)
    assert pass_time(supervisor, 0, RULES.starting_silence_ns_max - 1) == []
    (killed,) = pass_time(supervisor, 59 * SECOND, RULES.starting_silence_ns_max)
    assert killed == KillChild(1, "it has sent no heartbeat for 60 s")


def test_nobody_is_killed_because_the_machine_slept() -> None:
    supervisor = serving(1)
    pass_time(supervisor, 0, SECOND, [1])
    day_ns = 86_400 * SECOND
    assert supervisor.tick(day_ns) == []
    assert pass_time(supervisor, day_ns, day_ns + 8 * SECOND) == []
    assert pass_time(supervisor, day_ns + 8 * SECOND, day_ns + 10 * SECOND) != []


def test_what_is_heard_of_an_earlier_life_counts_for_nothing() -> None:
    supervisor = serving(1)
    supervisor.ended(1, 1, 1, 0)
    pass_time(supervisor, 0, 100 * MS)
    assert supervisor.serves(1, 1, 100 * MS) == []
    assert supervisor.ended(1, 1, 1, 100 * MS) == []
    supervisor.heard(1, 1, 50 * SECOND)
    assert pass_time(supervisor, 100 * MS, 61 * SECOND) != []


def test_a_child_that_says_why_it_cannot_start_ends_everything() -> None:
    supervisor = Supervisor(3, RULES)
    supervisor.begin(0)
    supervisor.serves(1, 1, SECOND)
    supervisor.failed(2, 1, WRONG)
    assert supervisor.ended(2, 1, 1, SECOND) == [
        ReapChild(2, 1, False, None, WRONG),
        TellChild(1, ToldWord.DRAIN),
        TellChild(3, ToldWord.DRAIN),
    ]
    assert supervisor.serves(3, 1, SECOND) == []
    assert supervisor.ended(1, 1, 0, SECOND) == [ReapChild(1, 0, True, None, None)]
    assert supervisor.ended(3, 1, 0, SECOND)[-1] == EndSupervision(1, WRONG)


def test_a_child_that_keeps_crashing_at_the_start_ends_everything() -> None:
    supervisor = Supervisor(1, RULES)
    supervisor.begin(0)
    now_ns = 0
    for life in range(1, RULES.first_lives_max):
        (reaped,) = supervisor.ended(1, life, -11, now_ns)
        assert isinstance(reaped, ReapChild)
        now_ns += 2 * SECOND
        pass_time(supervisor, now_ns, now_ns + 1)
    assert supervisor.ended(1, RULES.first_lives_max, -11, now_ns)[-1] == EndSupervision(1, None)


def test_a_child_that_cannot_start_later_is_tried_again() -> None:
    supervisor = serving(2)
    supervisor.failed(2, 1, WRONG)
    assert supervisor.ended(2, 1, 1, 0) == [ReapChild(2, 1, False, 100 * MS, WRONG)]


def test_a_signal_drains_all_and_a_second_one_hurries_them() -> None:
    supervisor = serving(3)
    supervisor.ended(3, 1, -9, 0)
    words = [TellChild(1, ToldWord.DRAIN), TellChild(2, ToldWord.DRAIN)]
    assert supervisor.stop(0) == words
    assert supervisor.ended(1, 1, 0, SECOND) == [ReapChild(1, 0, True, None, None)]
    assert supervisor.stop(2 * SECOND) == [TellChild(2, ToldWord.HURRY)]
    (killed,) = pass_time(supervisor, 2 * SECOND, 13 * SECOND, [2])
    assert killed == KillChild(2, "it has not ended in time")
    assert supervisor.ended(2, 1, -9, 13 * SECOND)[-1] == EndSupervision(1, None)


def test_a_signal_while_nothing_runs_ends_at_once() -> None:
    supervisor = serving(1)
    supervisor.ended(1, 1, -9, 0)
    assert supervisor.stop(0) == [EndSupervision(0, None)]


def test_a_drain_has_a_bound() -> None:
    supervisor = serving(1)
    supervisor.stop(0)
    assert pass_time(supervisor, 0, RULES.drain_ns_max - 1, [1]) == []
    assert len(pass_time(supervisor, 0, RULES.drain_ns_max, [1])) == 1


def test_children_reload_one_after_the_other() -> None:
    supervisor = serving(3)
    assert supervisor.reload(0) == [TellChild(1, ToldWord.RELOAD)]
    assert supervisor.reloaded(2, 1, 0) == []
    assert supervisor.reloaded(1, 1, 0) == [TellChild(2, ToldWord.RELOAD)]
    # The one that reloads ends: the next one is told.
    assert supervisor.ended(2, 1, 1, 0)[1:] == [TellChild(3, ToldWord.RELOAD)]
    assert supervisor.reloaded(3, 1, 0) == []


def test_a_child_that_does_not_reload_does_not_hold_up_the_others() -> None:
    supervisor = serving(2)
    supervisor.reload(0)
    assert pass_time(supervisor, 0, RULES.reload_ns_max - 1, [1, 2]) == []
    assert pass_time(supervisor, 0, RULES.reload_ns_max, [1, 2]) == [TellChild(2, ToldWord.RELOAD)]
