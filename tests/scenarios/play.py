"""Plays scenarios: text files of commands, each followed by its effects.

    # A line that does not begin with a blank is a command; the others are its effects, which the test compares.
    publish orders[0] a b
        0.000  published orders[0] @1 b'a', @2 b'b' (1 bytes each)

`python -m tests.scenarios.play FILE…` writes the effects anew; read the difference before you keep it. The first
command chooses the player: `subscription` plays the rules of acknowledged work, `broker` a whole broker on a disk
(broker_player.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Protocol

from runnel.config.units import parse_duration
from runnel.group_rules.definition import Mode, SubscriptionOptions
from tests.group_rules.history import Event, Place, Restarted, Stored, Stretch, Wanted, seconds
from tests.group_rules.stage import Stage
from tests.scenarios.broker_player import BrokerPlayer

FOLDER = Path(__file__).parent


class Player(Protocol):
    """Runs the commands of a file."""

    def do(self, words: list[str]) -> Iterable[str]:
        """Run a command. Returns its effects, line by line."""

    def close(self) -> None:
        """End: the file has no more commands."""


class SubscriptionPlayer:
    """Plays the rules of a consumer group. The checker sees every event.

    subscription MODE [OPTION=VALUE …]      publish orders[0] KEY …         ("-": none)
    join CONSUMER [MESSAGES [BYTES]]        window CONSUMER MESSAGES        leave | lose CONSUMER
    deliver                                 wait DURATION                   (and look at the clock)
    ack CONSUMER 7 | 7@18 | 7@18-20 …       up-to CONSUMER orders[0]@20
    nack CONSUMER 7@18 … [delay=DURATION]   renew CONSUMER 7 …              give-back CONSUMER 7@18 …
    dead-letter | fail-dead-letter orders[0]@18        send-back orders[0]@18          move orders[0]@18
    pause | resume                          store                           crash
    finish                                  (nothing is owed)
    """

    def __init__(self, words: list[str]) -> None:
        mode, *given = words
        options = dict(word.split("=") for word in given)
        self._stage = Stage(_options(options), is_keyed=Mode.checked(mode) is Mode.KEY_SHARED)
        self._stage.make_group()
        self._told = 0
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "publish": self._publish,
            "join": lambda words: self._stage.join("", *self._window(words)),
            "window": lambda words: self._stage.resize("", *self._window(words)),
            "leave": lambda words: self._stage.leave("", int(words[0]), is_clean=True),
            "lose": lambda words: self._stage.leave("", int(words[0]), is_clean=False),
            "deliver": self._deliver,
            "wait": self._wait,
            "ack": self._ack,
            "up-to": lambda words: self._stage.ack_up_to("", int(words[0]), *_message(words[1])),
            "nack": self._nack,
            "renew": lambda words: self._stage.renew("", int(words[0]), [*map(int, words[1:])]),
            "give-back": lambda words: self._stage.give_back("", int(words[0]), _parts(words[1:])),
            "dead-letter": lambda words: self._stage.write_dead_letter(
                "", *_message(words[0]), is_stored=True
            ),
            "fail-dead-letter": lambda words: self._stage.write_dead_letter(
                "", *_message(words[0]), is_stored=False
            ),
            "send-back": lambda words: self._stage.reopen("", *_message(words[0])),
            "move": lambda words: self._stage.move("", *_message(words[0])),
            "pause": lambda words: self._stage.pause(is_paused=True),
            "resume": lambda words: self._stage.pause(is_paused=False),
            "store": lambda words: self._stage.store(),
            "crash": lambda words: self._stage.restart(_Loser()),
            "finish": lambda words: self._stage.finish(),
        }

    def do(self, words: list[str]) -> Iterable[str]:
        self._commands[words[0]](words[1:])
        events = self._stage.checker.history[self._told :]
        self._told += len(events)
        return [_told(event) for event in events if not isinstance(event, Wanted)]

    def close(self) -> None:
        """It has nothing to close."""

    def _publish(self, words: list[str]) -> None:
        place = _place(words[0])
        if place not in self._stage.log.ends:
            self._stage.make_place(place)
            self._stage.begin("", place, 1)
            self._told = self._stage.checker.number
        self._stage.publish(place, [None if word == "-" else word.encode() for word in words[1:]])

    def _window(self, words: list[str]) -> tuple[int, int, int]:
        messages = int(words[1]) if len(words) > 1 else 100
        return int(words[0]), messages, int(words[2]) if len(words) > 2 else 1_000_000

    def _deliver(self, words: list[str]) -> None:
        """Deliver until the group wants nothing more."""
        self._stage.extend("")
        while (want := self._stage.want("")) is not None:
            run = self._stage.read("", want)
            if run is not None:
                self._stage.offer("", want.key, run)
        self._stage.rest("")

    def _wait(self, words: list[str]) -> None:
        self._stage.pass_time(parse_duration(words[0]))
        self._stage.expire("")

    def _ack(self, words: list[str]) -> None:
        deliveries = [int(word) for word in words[1:] if "@" not in word]
        parts = _parts([word for word in words[1:] if "@" in word])
        self._stage.ack("", int(words[0]), deliveries, parts)

    def _nack(self, words: list[str]) -> None:
        delays = [word.removeprefix("delay=") for word in words if word.startswith("delay=")]
        parts = _parts([word for word in words[1:] if "@" in word])
        delay_ns = parse_duration(delays[0]) if delays else None
        self._stage.nack("", int(words[0]), parts, delay_ns)


class _Loser(Random):
    """The worst crash: everything that was not stored is lost, and the clock starts at zero."""

    def randint(self, a: int, b: int) -> int:
        return a

    def random(self) -> float:
        return 0.0


PLAYERS: dict[str, Callable[[list[str]], Player]] = {
    "subscription": SubscriptionPlayer,
    "broker": BrokerPlayer,
}


def play(text: str) -> str:
    """The text of a scenario with its current effects."""
    player: Player | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if player is None:
            player = PLAYERS[words[0]](words[1:])
            continue
        try:
            lines += [f"    {told}" for told in player.do(words)]
        except Exception as error:
            error.add_note("\n".join(lines))
            player.close()
            raise
    if player is not None:
        player.close()
    return "\n".join(lines) + "\n"


def _told(event: Event) -> str:
    # Without line numbers, and every crash is the worst one.
    if isinstance(event, Stored):
        return f"{seconds(event.at_ns)}  what was told so far is stored"
    if isinstance(event, Restarted):
        return f"{seconds(event.at_ns)}  the broker starts again, with what was stored"
    return str(event).strip()


# --- Words ---


def _options(given: dict[str, str]) -> SubscriptionOptions:
    durations = {
        f"{name}_ns"
        if not name.endswith("_max")
        else f"{name.removesuffix('_max')}_ns_max": parse_duration(value)
        for name, value in given.items()
        if name in ("lease", "retry_delay", "retry_delay_max")
    }
    return SubscriptionOptions(
        deliveries_max=int(given.get("deliveries_max", "8")),
        backoff=float(given.get("backoff", "2")),
        **durations,
    )


def _place(word: str) -> Place:
    topic, _, partition = word.removesuffix("]").partition("[")
    return topic, int(partition)


def _message(word: str) -> tuple[Place, int]:
    place, offset = word.split("@")
    return _place(place), int(offset)


def _parts(words: Iterable[str]) -> list[Stretch]:
    parts = []
    for word in words:
        delivery, offsets = word.split("@")
        begin, _, last = offsets.partition("-")
        parts.append(Stretch(int(delivery), int(begin), int(last or begin) + 1))
    return parts


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(play(path.read_text()))
