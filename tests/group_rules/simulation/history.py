"""One simulated life of a subscription, drawn from a seed: consumers that crash, stall and nack, a broker that dies.

    outcome = run_history(seed)          # raises HistoryFailed: what broke, everything that led to it, how to replay

The groups run unchanged; log, state journal and clock are small models (tests/group_rules/stage.py), and the checker
sees every event as it happens. In the end everything works again for long enough: then no message may be left.
`tests/simulation` is the kernel of it.

history     this: what happens, one operation after the other     plan     what the seed draws before the history begins
consumer    what a client library knows                           rubbish  what no client library says
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from runnel.group_rules.definition import Mode
from runnel.group_rules.group import Group
from tests.group_rules.expectations import trail
from tests.group_rules.history import (
    Delivered,
    Place,
    Published,
    Restarted,
    Stretch,
    numbered,
)
from tests.group_rules.messages import Run
from tests.group_rules.simulation.consumer import SimulatedConsumer
from tests.group_rules.simulation.plan import MS, Plan, draw
from tests.group_rules.simulation.rubbish import talk_rubbish
from tests.group_rules.stage import Stage, offsets_of
from tests.simulation import history as kernel
from tests.simulation.history import Outcome, Violation
from tests.simulation.operations import OperationTable
from tests.simulation.troubles import Trouble

# More than any group of these small histories takes to come to rest.
ROUNDS_MAX = 1_000
# Bits of offsets are kept in blocks of 4,096: some histories cross from one to the next.
FIRST_OFFSETS = (1, 1, 4_075, 4_090, 8_180)


def run_history(
    seed: int,
    *,
    make_group: Callable[..., Group] = Group,
    change: Callable[[Plan], Plan] = lambda plan: plan,
) -> Outcome:
    """The history of this seed; `make_group` may make groups that break a rule, `change` may alter the plan."""
    random = Random(seed)
    history = History(change(draw(random)), random, make_group)
    return kernel.run(history, seed, f"bin/soak subscriptions --seed {seed}")


class History:
    """Consumer groups on a stage, their consumers, and a checker that sees every event."""

    def __init__(self, plan: Plan, random: Random, make_group: Callable[..., Group]) -> None:
        self.plan = plan
        self.random = random
        self.stage = Stage(
            plan.options,
            is_keyed=plan.is_keyed,
            waiting_max=plan.waiting_max,
            make_group=make_group,
        )
        self.stage.on_recall = self._on_recall
        self.consumers: dict[int, SimulatedConsumer] = {}
        self._consumer_count = self._place_count = 0
        self._reading: dict[str, tuple[Place, Run]] = {}  # read, and not offered yet

    def counts(self) -> Mapping[str, int]:
        events = self.stage.checker.history
        return {
            "messages": sum(len(event.keys) for event in events if isinstance(event, Published)),
            "deliveries": sum(isinstance(event, Delivered) for event in events),
            "restarts": sum(isinstance(event, Restarted) for event in events),
        }

    def transcript(self, violation: Violation | None = None) -> Sequence[str]:
        """All events; those that concern the violation are marked."""
        events = self.stage.checker.history
        lines = [str(self.plan), *numbered(events)]
        if violation is not None and violation.about is not None:
            for number, _ in trail(events, violation.about):
                lines[number] = f"> {lines[number]}"
        return [line if line.startswith(">") else f"  {line}" for line in lines]

    def _has(self, trouble: Trouble) -> bool:
        return trouble in self.plan.troubles

    # --- Operations ---

    def run(self) -> None:
        for place in self.plan.places:
            self.stage.make_place(place, self.random.choice(FIRST_OFFSETS))
        if self.plan.mode is not Mode.MULTICAST:
            self._begin_group("")
        for operation in (self.publish, self.join, self.publish, self.join, self.deliver):
            operation()
        steps = self._operations().draw_many(self.random, self.plan.troubles, self.plan.steps)
        for operation in steps:
            operation()
        self._settle()
        if self.random.random() < 0.3:
            self.stage.store()
            self.restart()
            self._settle()

    def _operations(self) -> OperationTable[Callable[[], None]]:
        return OperationTable(
            plain={
                self.publish: 14,
                self.deliver: 20,
                self.join: 8,
                self.leave: 2,
                self.resize: 3,
                self.ack: 14,
                self.ack_whole: 6,
                self.ack_up_to: 4,
                self.renew: 3,
                self.give_back: 6,
                self.return_unbegun: 4,
                self.pass_time: 12,
                self.write_dead_letter: 7,
                self.store: 6,
                self.compact: 1,
                self.make_place: 0.5,
                self.look: 4,
            },
            troubles={
                Trouble.POWER_LOSS: {self.restart: 4},
                Trouble.LOST_CONSUMER: {self.lose: 4},
                Trouble.STALLED_CONSUMER: {self.stall: 5},
                Trouble.NACK: {self.nack: 18},
                Trouble.BAD_ACK: {self.rubbish: 8},
                Trouble.OPERATOR: {self.move: 2, self.pause: 3, self.send_back: 10, self.remove: 1},
                Trouble.RETENTION: {self.retain: 3},
                Trouble.DEAD_LETTER_FAULT: {self.fail_to_bury: 4},
            },
        )

    # --- Groups, partitions, messages ---

    def _begin_group(self, name: str) -> None:
        self.stage.make_group(name)
        for place in self.stage.log.ends:
            # A member of a multicast owes what comes after its joining.
            floor = self.stage.log.ends[place] if name else self.stage.log.first(place)
            self.stage.begin(name, place, floor)

    def _any_group(self) -> str | None:
        names = sorted(self.stage.groups)
        return self.random.choice(names) if names else None

    def _any_place(self, name: str) -> Place | None:
        places = self.stage.places[name]
        return self.random.choice(places) if places else None

    def make_place(self) -> None:
        self._place_count += 1
        place = ("later", self._place_count)
        self.stage.make_place(place)
        for name in self.stage.groups:
            self.stage.begin(name, place, 1)

    def publish(self) -> None:
        place = self.random.choice(list(self.stage.log.ends))
        count = self.random.choice((1, 1, 2, 3, 8, 20))
        keys = [self.random.choice(self.plan.keys) for _ in range(count)]
        run = self.stage.publish(place, keys, self.random.choice((1, 1, 10, 10, 100)))
        for name, places in self.stage.places.items():
            if place not in places or (self._has(Trouble.LAG) and self.random.random() < 0.3):
                continue
            self.stage.extend(name)
            if not self.stage.is_paused and self.random.random() < 0.3:
                self._offer(name, place, run)  # as it comes, without having been asked for

    def retain(self) -> None:
        place = self.random.choice(list(self.stage.log.ends))
        first, end = self.stage.log.first(place), self.stage.log.ends[place]
        if first == end:
            return
        begin = first if self.random.random() < 0.7 else self.random.randint(first, end - 1)
        self.stage.retain(place, begin, min(end, begin + self.random.choice((1, 2, 6))))

    def remove(self) -> None:
        """A member is removed, or a topic is deleted."""
        name = self._any_group()
        if name is None:
            return
        if self.plan.mode is Mode.MULTICAST:
            for consumer in [c for c in self.consumers.values() if c.group == name]:
                self._leave(consumer, is_clean=True)
            self._reading.pop(name, None)
            self.stage.remove_group(name)
            return
        topics = sorted({topic for topic, _ in self.stage.log.ends})
        if len(topics) > 1:
            self.stage.remove_topic(self.random.choice(topics))

    # --- Consumers ---

    def join(self) -> None:
        if self.plan.mode is Mode.MULTICAST:
            name = self.random.choice(self.plan.members)
            if name not in self.stage.groups:
                self._begin_group(name)
            for other in [c for c in self.consumers.values() if c.group == name]:
                self._leave(other, is_clean=self.random.random() < 0.5)  # its place is taken
        else:
            name = ""
            if len(self.consumers) >= self.plan.consumers_max:
                return
        self._join(name, self._window())

    def _join(self, name: str, window: tuple[int, int]) -> None:
        self._consumer_count += 1
        consumer = SimulatedConsumer(self._consumer_count, name)
        self.consumers[consumer.number] = consumer
        self.stage.join(name, consumer.number, *window)

    def _window(self) -> tuple[int, int]:
        return (
            self.random.choice((0, 1, 3, 5, 5, 10, 20, 20, 100)),
            self.random.choice((0, 15, 100, 100, 1000, 1000, 1000, 10_000)),
        )

    def resize(self) -> None:
        if (consumer := self._any_consumer()) is not None:
            self.stage.resize(consumer.group, consumer.number, *self._window())

    def _any_consumer(self) -> SimulatedConsumer | None:
        return self.random.choice(list(self.consumers.values())) if self.consumers else None

    def _any_worker(self) -> SimulatedConsumer | None:
        """One that has something to answer, and does answer; if there is none, make it likelier next time."""
        workers = [c for c in self.consumers.values() if c.inbox and not c.is_stalled]
        if workers:
            return self.random.choice(workers)
        (self.deliver if self.consumers else self.join)()
        return None

    def leave(self) -> None:
        if (consumer := self._any_consumer()) is not None:
            self._leave(consumer, is_clean=True)

    def lose(self) -> None:
        if (consumer := self._any_consumer()) is not None:
            self._leave(consumer, is_clean=False)

    def _leave(self, consumer: SimulatedConsumer, *, is_clean: bool) -> None:
        del self.consumers[consumer.number]
        self.stage.leave(consumer.group, consumer.number, is_clean=is_clean)

    def stall(self) -> None:
        if (consumer := self._any_consumer()) is not None:
            consumer.is_stalled = not consumer.is_stalled and self.random.random() < 0.6

    # --- Deliveries ---

    def deliver(self) -> None:
        if self.stage.is_paused and self.random.random() < 0.7:
            return
        if self.stage.is_paused:
            self.pause()
        if (name := self._any_group()) is not None:
            self.stage.extend(name)
            if (read := self._reading.pop(name, None)) is not None:
                self._offer(name, *read)
            elif self._has(Trouble.LAG) and self.random.random() < 0.4:
                self._read(name)
            else:
                rounds = self.random.choice((1, 2, ROUNDS_MAX))
                self._pump(name, rounds)

    def _pump(self, name: str, rounds: int) -> bool:
        """Read and offer what the group wants. Says whether it came to rest."""
        for _ in range(rounds):
            if not self._read(name):
                # What waits in queues may keep others from being looked at, if it is many.
                if not self.plan.is_keyed or self.plan.waiting_max > 1000:
                    self.stage.rest(name)
                return True
            if (read := self._reading.pop(name, None)) is not None:
                self._offer(name, *read)
        if rounds == ROUNDS_MAX:
            raise Violation(f"after {rounds} times the group still wants something")
        return False

    def _read(self, name: str) -> bool:
        """Whether the group wants anything; if the log has it, it is being read then."""
        want = self.stage.want(name)
        if want is None:
            return False
        run = self.stage.read(name, want)
        if run is not None:
            if self.random.random() < 0.5:
                run = run.cut(want.begin, want.end)
            self._reading[name] = (want.key, run)
        return True

    def _offer(self, name: str, place: Place, run: Run) -> None:
        """What is read may be of a partition that is removed meanwhile, or done, or gone."""
        for delivery in self.stage.offer(name, place, run):
            self.consumers[delivery.consumer].take(delivery.id, place, offsets_of(delivery))

    # --- What consumers say ---

    def ack(self) -> None:
        if (consumer := self._any_worker()) is not None:
            self.stage.ack(
                consumer.group,
                consumer.number,
                (),
                consumer.answer(self.random),
                is_picked=self.random.random() < 0.4,
            )

    def ack_whole(self) -> None:
        if (consumer := self._any_worker()) is not None:
            delivery = self.random.choice(list(consumer.inbox))
            consumer.answer_whole(delivery)
            self.stage.ack(consumer.group, consumer.number, (delivery,), ())

    def ack_up_to(self) -> None:
        if (consumer := self._any_worker()) is not None:
            delivery = self.random.choice(list(consumer.inbox))
            place = consumer.places[delivery]
            offset = self.random.choice(consumer.inbox[delivery])
            if place in self.stage.places[consumer.group]:
                consumer.answer_up_to(place, offset)
                self.stage.ack_up_to(consumer.group, consumer.number, place, offset)

    def nack(self) -> None:
        if (consumer := self._any_worker()) is not None:
            delay_ns = self.random.choice((None, None, 0, 50 * MS, 3000 * MS))
            # With keys, a failure at the front is the one that brings others back.
            is_front = self.random.random() < 0.4
            parts = consumer.answer_first() if is_front else consumer.answer(self.random)
            self.stage.nack(consumer.group, consumer.number, parts, delay_ns)

    def renew(self) -> None:
        if (consumer := self._any_worker()) is not None:
            lease_ns = self.random.choice((None, None, 0, 100 * MS, 60_000 * MS))
            count = self.random.randint(1, len(consumer.inbox))
            deliveries = self.random.sample(sorted(consumer.inbox), count)
            self.stage.renew(consumer.group, consumer.number, deliveries, lease_ns)

    def give_back(self) -> None:
        asked = [c for c in self.consumers.values() if c.recalled and not c.is_stalled]
        if asked:
            consumer = self.random.choice(asked)
            count = self.random.randint(1, len(consumer.recalled))
            parts = self.random.sample(consumer.recalled, count)
            consumer.give_back(parts)
            self.stage.give_back(consumer.group, consumer.number, parts)

    def return_unbegun(self) -> None:
        if (consumer := self._any_worker()) is not None:
            is_front = self.random.random() < 0.4
            parts = consumer.answer_first() if is_front else consumer.answer(self.random)
            self.stage.return_unbegun(consumer.group, consumer.number, parts)

    def _on_recall(self, consumer: int, part: Stretch) -> None:
        if consumer in self.consumers:  # it may be the one that leaves
            self.consumers[consumer].recall(part)

    def rubbish(self) -> None:
        if self.consumers:
            talk_rubbish(self.stage, self.consumers, self.random)

    # --- Time, dead letters ---

    def pass_time(self) -> None:
        for consumer in self.consumers.values():
            if consumer.inbox and not consumer.is_stalled and self.random.random() < 0.8:
                self.stage.renew(consumer.group, consumer.number, list(consumer.inbox))
        lease_ns = self.plan.options.lease_ns
        next_ns = self.stage.next_time_ns()
        if next_ns is not None and next_ns > self.stage.now_ns and self.random.random() < 0.3:
            duration_ns = next_ns - self.stage.now_ns
        else:
            duration_ns = self.random.choice(
                (MS, lease_ns // 3, lease_ns // 3, lease_ns - 1, lease_ns, 5_000 * MS)
            )
        self.stage.pass_time(duration_ns)
        if not (self._has(Trouble.LAG) and self.random.random() < 0.3):
            self._expire()

    def _expire(self) -> None:
        for name in self.stage.groups:
            self.stage.expire(name)

    def write_dead_letter(self) -> None:
        if self.stage.dead_letters:
            self.stage.write_dead_letter(
                *self.random.choice(self.stage.dead_letters), is_stored=True
            )

    def fail_to_bury(self) -> None:
        if self.stage.dead_letters:
            self.stage.write_dead_letter(
                *self.random.choice(self.stage.dead_letters), is_stored=False
            )

    # --- The broker and its operators ---

    def move(self) -> None:
        name = self._any_group()
        place = None if name is None else self._any_place(name)
        if name is not None and place is not None:
            first, end = self.stage.log.first(place), self.stage.log.ends[place]
            self.stage.move(
                name, place, self.random.choice((first, end, self.random.randint(first, end)))
            )

    def pause(self) -> None:
        self.stage.pause(is_paused=not self.stage.is_paused)
        self._reading.clear()

    def send_back(self) -> None:
        """Dead letters whose messages the log still has."""
        dead = [dead for dead in sorted(self.stage.dead) if self.stage.log.has(*dead[1:])]
        for each in self.random.sample(dead, min(len(dead), self.random.choice((1, 3)))):
            self.stage.reopen(*each)
        if self.random.random() < 0.5:
            self.stage.store()

    def store(self) -> None:
        self.stage.store(self.random.choice((1, 3, None)))

    def compact(self) -> None:
        self.stage.compact()

    def restart(self) -> None:
        self.consumers.clear()
        self._reading.clear()
        self.stage.restart(self.random)

    def look(self) -> None:
        for name, places in self.stage.places.items():
            for place in places:
                self.stage.state(name, place)

    # --- The end ---

    def _settle(self) -> None:
        """Everything works: in the end nothing is owed."""
        if self.stage.is_paused:
            self.stage.pause(is_paused=False)
        for consumer in list(self.consumers.values()):
            if self.random.random() < 0.4:
                self._leave(consumer, is_clean=self.random.random() < 0.5)
        for name in self.stage.groups:
            self.stage.extend(name)
            self._join(
                name, (self.random.choice((3, 1000)), self.random.choice((40, 10**6, 10**6)))
            )
        for _ in range(ROUNDS_MAX):
            if not self._settle_round():
                break
        else:
            raise Violation(f"work has not come to an end after {ROUNDS_MAX} rounds")
        self.look()
        self.stage.finish()

    def _settle_round(self) -> bool:
        """Whether anything happened, if only that time passed."""
        before = self.stage.checker.number
        self._expire()
        while self.stage.dead_letters:
            self.write_dead_letter()
        for consumer in self.consumers.values():
            if consumer.recalled:
                parts = list(consumer.recalled)
                consumer.give_back(parts)
                self.stage.give_back(consumer.group, consumer.number, parts)
        for name in self.stage.groups:
            if (read := self._reading.pop(name, None)) is not None:
                self._offer(name, *read)
            self._pump(name, ROUNDS_MAX)
        has_work = False
        for consumer in self.consumers.values():
            while consumer.inbox:
                has_work = True
                self.stage.ack(consumer.group, consumer.number, (), consumer.answer(self.random))
        if has_work or self.stage.dead_letters:
            return True
        next_ns = self.stage.next_time_ns()
        if next_ns is None:
            return False
        self.stage.pass_time(max(0, next_ns - self.stage.now_ns))
        return self.stage.checker.number > before
