"""Runs one history from its seed, and reports a failure with the transcript and the command that replays it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from runnel.topics.names import TopicPartition
from tests.fakes.power import PowerLoss

_UNEXPECTED: Final = "unexpected "


# A partition, and offsets in it.
About: TypeAlias = tuple[TopicPartition, AbstractSet[int]]


class Violation(AssertionError):
    """The code under test broke a promise. `about` names the messages that it concerns."""

    def __init__(self, text: str, about: About | None = None) -> None:
        super().__init__(text)
        self.about = about


class HistoryFailed(AssertionError):
    """A history broke a promise. The text holds the problem, the transcript and the replay command."""

    def __init__(self, seed: int, transcript: Sequence[str], problem: str, replay: str) -> None:
        lines = "\n".join(f"  {line}" for line in transcript)
        super().__init__(f"history {seed}: {problem}\n{lines}\n  => {problem}\nreplay: {replay}")
        self.seed = seed
        self.transcript = tuple(transcript)
        self.problem = problem
        self.replay = replay

    @property
    def is_violation(self) -> bool:
        """Whether the model found a broken promise; otherwise the code under test raised an unexpected error."""
        return not self.problem.startswith(_UNEXPECTED)

    def __reduce__(self) -> tuple[type[HistoryFailed], tuple[int, tuple[str, ...], str, str]]:
        # bin/soak receives failures from worker processes.
        return (type(self), (self.seed, self.transcript, self.problem, self.replay))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a history did. Two runs of one seed have equal outcomes."""

    seed: int
    counts: Mapping[str, int]
    transcript: tuple[str, ...]


class History(Protocol):
    """One simulated life, from its first operation to its last check."""

    def run(self) -> None:
        """Run everything. Raises a Violation if a promise is broken."""

    def transcript(self, violation: Violation | None = None) -> Sequence[str]:
        """What happened, line by line. Lines that concern the violation may be marked."""

    def counts(self) -> Mapping[str, int]:
        """How much happened, for the totals of bin/soak: messages, deliveries, restarts and so on."""


def run(history: History, seed: int, replay: str) -> Outcome:
    """Run a history. Raises HistoryFailed if it breaks a promise or meets an error that nothing explains."""
    try:
        history.run()
    except Violation as violation:
        text = str(violation)
        raise HistoryFailed(seed, history.transcript(violation), text, replay) from violation
    except (Exception, PowerLoss) as error:
        problem = f"{_UNEXPECTED}{type(error).__name__}: {error}"
        raise HistoryFailed(seed, history.transcript(), problem, replay) from error
    return Outcome(seed, history.counts(), tuple(history.transcript()))
