"""Groups that break one rule each, which histories must find. Each docstring says what the group does wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from runnel.formats.work_heads import DeliveryPart, Picked
from runnel.group_rules.ack_set import AckSet
from runnel.group_rules.awaited_holders import AwaitedHolders
from runnel.group_rules.definition import SubscriptionOptions
from runnel.group_rules.effects import Effects, Failure, LeasedDelivery, Want
from runnel.group_rules.group import Group
from runnel.topics.names import TopicPartition

EVERYTHING: Final = 2**40


# --- Acknowledging ---


class ForgetsAcks(Group):
    """Acknowledgements are not recorded for storing."""

    def ack(self, *arguments: Any) -> Effects:
        return replace(super().ack(*arguments), acked=[], picked=[])


class ForgetsAcksUpTo(Group):
    """The same of those that are acknowledged up to an offset."""

    def ack_up_to(self, *arguments: Any) -> Effects:
        return replace(super().ack_up_to(*arguments), acked=[], picked=[])


class AcksBehindTheOffset(Group):
    """One message more than was asked for is done."""

    def ack_up_to(self, consumer: int, key: TopicPartition, offset: int, now_ns: int) -> Effects:
        return super().ack_up_to(consumer, key, offset + 1, now_ns)


class AsksNoQuestions(Group):
    """A consumer may acknowledge messages that another consumer holds."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._holders: dict[int, int] = {}

    def offer(self, *arguments: Any, **options: Any) -> list[LeasedDelivery]:
        deliveries = super().offer(*arguments, **options)
        self._holders |= {delivery.id: delivery.consumer for delivery in deliveries}
        return deliveries

    def ack(
        self,
        consumer: int,
        deliveries: Sequence[int],
        parts: Sequence[DeliveryPart],
        now_ns: int,
        picked: Sequence[Picked] = (),
    ) -> Effects:
        named = [*deliveries, *(part.delivery for part in parts)]
        named += [part.delivery for part in picked]
        holder = self._holders.get(named[0], consumer) if named else consumer
        return super().ack(holder, deliveries, parts, now_ns, picked)


class HidesLateness(Group):
    """A consumer whose ack is late is not informed."""

    def ack(self, *arguments: Any) -> Effects:
        return replace(super().ack(*arguments), late=[])


class ForgetsStoredAcks(Group):
    """After a restart, only what lies before the first message that is not done is known to be done."""

    def add_partition(
        self, key: TopicPartition, acked: AckSet, *arguments: Any, **options: Any
    ) -> None:
        super().add_partition(key, AckSet(acked.floor), *arguments, **options)


class JumpsOverHoles(Group):
    """After a restart, everything before the last acknowledged message is taken for done."""

    def add_partition(
        self, key: TopicPartition, acked: AckSet, *arguments: Any, **options: Any
    ) -> None:
        ends = [end for _, end in acked.ranges()]
        super().add_partition(key, AckSet(max([acked.floor, *ends])), *arguments, **options)


# --- Leases ---


class EndsLeasesEarly(Group):
    """Half of a lease is enough."""

    def expire(self, now_ns: int) -> Effects:
        return super().expire(now_ns + self.options.lease_ns // 2)


class NeverEndsLeases(Group):
    """A deadline means nothing."""

    def expire(self, now_ns: int) -> Effects:
        return super().expire(0)


class DoesNotRenew(Group):
    """Who works longer than a lease loses it."""

    def renew(self, *arguments: Any, **options: Any) -> None:
        pass


class LeasesTwice(Group):
    """What was offered is offered to the next as well."""

    def offer(self, key: TopicPartition, *arguments: Any, **options: Any) -> list[LeasedDelivery]:
        deliveries = super().offer(key, *arguments, **options)
        if not deliveries:
            return deliveries
        again = replace(deliveries[0], id=deliveries[-1].id + 1)
        return [*deliveries, again]


class LosesWhatIsGivenBack(Group):
    """Messages of a consumer that leaves are not delivered again."""

    def leave(self, consumer: int, now_ns: int, *, is_clean: bool) -> Effects:
        for key in list(self._partitions):
            self.ack_up_to(consumer, key, EVERYTHING, now_ns)
        return super().leave(consumer, now_ns, is_clean=is_clean)


class LosesWhatIsReturned(Group):
    """What a consumer returns unbegun counts as done."""

    def give_back(self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int) -> Effects:
        self.ack(consumer, (), parts, now_ns)
        return Effects()


class KeepsWhatIsReturned(Group):
    """What a consumer returns stays leased to it."""

    def give_back(self, *arguments: Any) -> Effects:
        return Effects()


class EndsLeasesSecretly(Group):
    """A consumer is not told that its leases have ended."""

    def expire(self, now_ns: int) -> Effects:
        return replace(super().expire(now_ns), expired=[])


class KeepsLeasesWhenMoved(Group):
    """A partition is moved, but for what somebody has of it."""

    def reset_partition(self, key: TopicPartition, floor: int) -> Effects:
        return Effects()


# --- Failures ---


class CountsGoodbyes(Group):
    """A consumer that leaves in order has failed."""

    def leave(self, consumer: int, now_ns: int, *, is_clean: bool) -> Effects:
        return super().leave(consumer, now_ns, is_clean=False)


class CountsReturns(Group):
    """A message that its consumer has returned unbegun has failed."""

    def give_back(self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int) -> Effects:
        effects = self.nack(consumer, parts, now_ns, delay_ns=0, reason="returned")
        return replace(effects, late=[])


class ForgivesLosses(Group):
    """A consumer that vanishes has not."""

    def leave(self, consumer: int, now_ns: int, *, is_clean: bool) -> Effects:
        return super().leave(consumer, now_ns, is_clean=True)


class ForgetsFailures(Group):
    """After a restart, nothing has failed before."""

    def add_partition(
        self,
        key: TopicPartition,
        acked: AckSet,
        failures: Mapping[int, Failure] | None = None,
        *,
        now_ns: int,
        awaited: AwaitedHolders | None = None,
    ) -> None:
        super().add_partition(key, acked, now_ns=now_ns, awaited=awaited)


class TellsNoFailures(Group):
    """A failure that a nack counts is not recorded for storing."""

    def nack(self, *arguments: Any, **options: Any) -> Effects:
        return replace(super().nack(*arguments, **options), failed=[])


class IgnoresDelays(Group):
    """A nack's message comes again at once."""

    def nack(self, *arguments: Any, delay_ns: int | None, reason: str) -> Effects:
        return super().nack(*arguments, delay_ns=0, reason=reason)


class TellsNobodyOfAttempts(Group):
    """A message that failed is delivered as if it were new."""

    def offer(self, *arguments: Any, **options: Any) -> list[LeasedDelivery]:
        return [replace(delivery, attempts=[]) for delivery in super().offer(*arguments, **options)]


class TakesTheLastForTheFirst(Group):
    """The time of the first delivery is that of the last."""

    def offer(
        self, key: TopicPartition, base: int, count: int, size_bytes: int, now_ns: int, *rest: Any
    ) -> list[LeasedDelivery]:
        return [
            replace(delivery, attempts=[(offset, n, now_ns) for offset, n, _ in delivery.attempts])
            for delivery in super().offer(key, base, count, size_bytes, now_ns, *rest)
        ]


# --- Dead letters ---


class BuriesTooLate(Group):
    """One more delivery than is allowed."""

    def __init__(self, options: SubscriptionOptions, **others: Any) -> None:
        if options.deliveries_max:
            options = replace(options, deliveries_max=options.deliveries_max + 1)
        super().__init__(options, **others)


class AcksBeforeBurial(Group):
    """A message is done before its dead letter is stored."""

    def nack(
        self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int, **options: Any
    ) -> Effects:
        effects = super().nack(consumer, parts, now_ns, **options)
        for dead_letter in effects.dead_letters:
            effects.acked += self.dead_letter_stored(
                dead_letter.key, dead_letter.offset, now_ns
            ).acked
        return effects


class ForgetsGraves(Group):
    """A dead letter that could not be stored is not tried again."""

    def dead_letter_failed(self, key: TopicPartition, offset: int, now_ns: int) -> Effects:
        return Effects()


class BuriesQuietly(Group):
    """The end of a dead-lettered message is not recorded for storing."""

    def dead_letter_stored(self, key: TopicPartition, offset: int, now_ns: int) -> Effects:
        return replace(super().dead_letter_stored(key, offset, now_ns), acked=[])


# --- Windows, and whose turn it is ---


class IgnoresWindows(Group):
    """Everybody gets as many messages as there are."""

    def join(self, consumer: int, *, window_messages: int, window_bytes: int) -> None:
        super().join(consumer, window_messages=EVERYTHING, window_bytes=window_bytes)


class IgnoresWindowBytes(Group):
    """However large they are."""

    def join(self, consumer: int, *, window_messages: int, window_bytes: int) -> None:
        super().join(consumer, window_messages=window_messages, window_bytes=EVERYTHING)


class IgnoresNewWindows(Group):
    """A window is what it was in the beginning."""

    def resize(self, *arguments: Any, **options: Any) -> None:
        pass


class SitsStill(Group):
    """Nothing is wanted while anything is in flight."""

    def next_want(self, now_ns: int) -> Want | None:
        return None if self.in_flight else super().next_want(now_ns)


# --- Keys ---


class KnowsNoKeys(Group):
    """A key's messages go to whomever has room."""

    def __init__(self, options: SubscriptionOptions, *, is_keyed: bool, **others: Any) -> None:
        super().__init__(options, is_keyed=False, **others)

    def offer(self, *arguments: Any, **options: Any) -> list[LeasedDelivery]:
        return super().offer(*arguments[:5])


class RecallsNothing(Group):
    """Those behind a failed message stay where they are."""

    def nack(self, *arguments: Any, **options: Any) -> Effects:
        return replace(super().nack(*arguments, **options), recalls=[])


class ReturnsOutOfOrder(Group):
    """Those behind a returned message stay where they are."""

    def give_back(self, *arguments: Any) -> Effects:
        return replace(super().give_back(*arguments), recalls=[])


class TakesRecallsForConfirmed(Group):
    """The group delivers a key again while its earlier consumer may still work on it."""

    def nack(
        self, consumer: int, parts: Sequence[DeliveryPart], now_ns: int, **options: Any
    ) -> Effects:
        effects = super().nack(consumer, parts, now_ns, **options)
        for holder, part in effects.recalls:
            self.recalled(holder, [part], now_ns)
        return effects


class NeverHearsOfRecalls(Group):
    """A confirmed recall changes nothing: the key waits for the lease to end."""

    def recalled(self, *arguments: Any) -> Effects:
        return Effects()


MUTANTS: Final[Sequence[type[Group]]] = (
    ForgetsAcks,
    ForgetsAcksUpTo,
    AcksBehindTheOffset,
    AsksNoQuestions,
    HidesLateness,
    ForgetsStoredAcks,
    JumpsOverHoles,
    EndsLeasesEarly,
    NeverEndsLeases,
    DoesNotRenew,
    LeasesTwice,
    LosesWhatIsGivenBack,
    LosesWhatIsReturned,
    KeepsWhatIsReturned,
    EndsLeasesSecretly,
    KeepsLeasesWhenMoved,
    CountsGoodbyes,
    CountsReturns,
    ForgivesLosses,
    ForgetsFailures,
    TellsNoFailures,
    IgnoresDelays,
    TellsNobodyOfAttempts,
    TakesTheLastForTheFirst,
    BuriesTooLate,
    AcksBeforeBurial,
    ForgetsGraves,
    BuriesQuietly,
    IgnoresWindows,
    IgnoresWindowBytes,
    IgnoresNewWindows,
    SitsStill,
    KnowsNoKeys,
    RecallsNothing,
    ReturnsOutOfOrder,
    TakesRecallsForConfirmed,
    NeverHearsOfRecalls,
)
