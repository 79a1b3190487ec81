"""The session of one connection: turns requests into the broker's verbs, and their results into frames.

A session knows neither sockets nor TLS. It takes frames, and hands bytes to an `Output`. It pauses the input while a
publish waits for room, while too many requests are unanswered, and while the client does not read. It begins requests
in the order of their arrival, and answers each when it is done. The verbs are those of an `Access`, which has the
rights of the token in the client's hello.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from runnel.broker.access import Access, MakeAccess, Scope, local_access
from runnel.broker.broker import Broker, Level, Published
from runnel.config import Settings
from runnel.errors import (
    BusyError,
    ClosedError,
    HandshakeError,
    MalformedError,
    RunnelError,
    UnauthenticatedError,
)
from runnel.formats import wire
from runnel.formats import work_heads as work
from runnel.formats.batch import Batch
from runnel.formats.frames import Frame
from runnel.platform.diagnostics import get_logger
from runnel.platform.tasks import OwnedTasks
from runnel.protocols.native import verbs
from runnel.protocols.native.answers import error_answer, published_answer
from runnel.protocols.native.consumers import Consumers
from runnel.protocols.native.greeting import checked_hello, scope_of, welcome_to
from runnel.protocols.native.large_answers import LargeAnswer, LargeAnswers
from runnel.protocols.native.output import Output, say
from runnel.protocols.native.request_quota import RequestQuota
from runnel.protocols.native.requests import check_no_tail, id_of, message_of, only_batch
from runnel.protocols.native.subscriptions import Subscriptions
from runnel.security.authenticator import UNRESTRICTED, AuthenticatedClient, Authenticator
from runnel.security.rights import Rights

logger = get_logger("runnel.native")

# Fetches and lists of one connection that are being read, or wait until the transport takes them.
LARGE_ANSWERS_MAX: Final = 8
# Several deliveries of work share a frame up to this size. The welcome tells the client the largest frame.
_WORK_BYTES_MAX: Final = 4 * 2**20

# Why the session begins no further request: bits of `_blocked_by`, read for every frame.
_ROOM: Final = 1  # the log's queue is full
_ANSWERS: Final = 2  # too many requests are unanswered
_OUTPUT: Final = 4  # the client does not read its answers
_TURN: Final = 8  # other connections have their turn
_PENALTY: Final = 16  # authentication failed, and the answer may have to wait

# Until authentication, everything is refused.
_NO_RIGHTS: Final = Rights("", ())


class _Stage(enum.Enum):
    """The stages of a session, in their order."""

    GREETING = "waits for hello"
    REFUSING = "about to be refused"
    OPEN = "open"
    DRAINING = "finishes accepted requests"
    CLOSED = "closed"


# Members that every frame is compared with. Looking them up in their enum takes several times as long.
_GREETING: Final = _Stage.GREETING
_DRAINING: Final = _Stage.DRAINING
_CLOSED: Final = _Stage.CLOSED
_NONE: Final = Level.NONE


class Session:
    """The broker's side of one connection: its requests, their answers, its subscriptions and consumers."""

    __slots__ = (
        "_access",
        "_appending",
        "_as_of",
        "_authenticated",
        "_authenticator",
        "_blocked_by",
        "_broker",
        "_ends_when_idle",
        "_frames",
        "_idle",
        "_is_in_parts",
        "_is_input_paused",
        "_large_answers",
        "_make_access",
        "_messages_fetched",
        "_output",
        "_request_quota",
        "_settings",
        "_stage",
        "_tasks",
        "_unanswered",
        "_waiting_fetches",
        "client",
        "consumers",
        "messages_in",
        "subscriptions",
    )

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        output: Output,
        *,
        authenticator: Authenticator | None,
        tasks: OwnedTasks | None = None,
        request_quota: RequestQuota | None = None,
        make_access: MakeAccess | None = None,
    ) -> None:
        """Without an authenticator the client needs no token, whatever the settings say.

        Without `make_access` the broker has everything: it is alone.
        """
        self._broker = broker
        self._authenticator = authenticator
        self._access = Access(broker, _NO_RIGHTS)
        self._make_access = make_access or local_access(broker)
        self._authenticated: AuthenticatedClient | None = None
        self._appending: asyncio.Task[None] | None = None  # the publish that waits for room
        self._as_of: int | None = None  # what another node said before its next request
        self._settings = settings
        self._output = output
        self._tasks = OwnedTasks("a session") if tasks is None else tasks
        self._request_quota = RequestQuota() if request_quota is None else request_quota
        self.subscriptions = Subscriptions(output)
        tail_bytes_max = min(settings.native.frame_bytes_max // 2, _WORK_BYTES_MAX)
        self.consumers = Consumers(output, tail_bytes_max=tail_bytes_max)
        self.client = ""  # the name that the client gives itself
        self.messages_in = self._messages_fetched = 0
        self._stage = _Stage.GREETING
        self._frames: deque[Frame] = deque()  # received, not begun
        self._blocked_by = 0
        self._is_in_parts = False  # the client merges what the nodes deliver
        self._is_input_paused = False
        self._unanswered = 0
        self._large_answers = LargeAnswers(LARGE_ANSWERS_MAX)
        self._waiting_fetches: set[asyncio.Task[None]] = set()
        self._ends_when_idle = False
        self._idle: asyncio.Event | None = None

    @property
    def has_greeted(self) -> bool:
        """Whether the client has said hello; its token may still turn out to be wrong."""
        return self._stage is not _Stage.GREETING

    @property
    def is_admitted(self) -> bool:
        """Whether the client has said hello and was admitted."""
        return self._stage in (_Stage.OPEN, _Stage.DRAINING)

    @property
    def token_name(self) -> str:
        """The name of the client's token; empty if it needed none."""
        return "" if self._authenticated is None else self._authenticated.name

    @property
    def is_held_back(self) -> bool:
        """Whether the client waits for the broker: then its silence is no reason to close the connection."""
        return bool(self._blocked_by & ~_OUTPUT)

    @property
    def messages_out(self) -> int:
        """Messages sent to the client: fetched, live and as work."""
        return (
            self._messages_fetched + self.subscriptions.messages_out + self.consumers.messages_out
        )

    # --- Events of the connection ---

    def receive(self, frames: Sequence[Frame]) -> None:
        """Take frames, in the order of their arrival."""
        if self._stage is _CLOSED:
            return
        if len(frames) == 1 and not self._blocked_by and not self._frames:
            self._begin(frames[0])  # a single frame needs no turn
            if self._ends_when_idle or self._idle is not None:
                self._check_idle()
            return
        self._frames.extend(frames)
        if not self._blocked_by:
            self._proceed()

    def end_input(self) -> None:
        """The client sends no more. It still gets its answers, unless its token's quota delays them.

        Most such clients are gone, which shows only once something is written to them.
        """
        self._ends_when_idle = True
        if self._access.has_slowed_reads:
            self._fail_slowed()
        self._check_idle()

    def _fail_slowed(self) -> None:
        self.fail(BusyError("the token reads faster than it may, and the client ended its input"))

    def pause_output(self) -> None:
        """The client reads more slowly than the broker writes."""
        self._block(_OUTPUT)
        self._large_answers.pause()
        self.subscriptions.pause()
        self.consumers.pause()

    def resume_output(self) -> None:
        self._blocked_by &= ~_OUTPUT
        self._large_answers.resume()
        self.subscriptions.resume()  # this may pause the output again
        if not self._blocked_by & _OUTPUT and self._stage is _Stage.OPEN:
            self.consumers.resume()
        self._proceed_if_unblocked()

    def drain(self, within_ms: int) -> None:
        """Begin no more requests that read or write messages; finish those that were begun."""
        if self._stage in (_Stage.GREETING, _Stage.REFUSING):
            self.fail(_shutting_down())
        elif self._stage is _Stage.OPEN:
            self._stage = _Stage.DRAINING
            closing = wire.Closing("the broker is shutting down; connect again later", within_ms)
            say(self._output, closing)
            self.consumers.pause()  # they could hardly acknowledge work that they begin now
            if self._appending is not None and self._access.is_slowed:
                self._appending.cancel()  # its quota may delay it for longer than a drain lasts
            self._access.give_up_slowed_reads()
            for task in self._waiting_fetches:
                task.cancel()

    async def wait_idle(self) -> None:
        """Wait until all requests are answered, or the session is closed."""
        if (self._frames or self._unanswered) and self._stage is not _Stage.CLOSED:
            if self._idle is None:
                self._idle = asyncio.Event()
            await self._idle.wait()

    def fail(self, error: RunnelError) -> None:
        """Tell the client why the connection cannot continue, then close it."""
        self._say_error(0, error)
        self.close()

    def close(self) -> None:
        """Release everything, and close the connection once all queued frames are written."""
        if self._stage is not _Stage.CLOSED:
            self.lost()
            self._output.close()

    def lost(self) -> None:
        """The connection is gone. Requests that change something finish; requests that only wait are cancelled."""
        self._close_consumers()
        self._stage = _Stage.CLOSED
        if self._authenticated is not None:
            self._authenticated.leave()
        self._frames.clear()
        self._broker.nodes.listeners.pop(self._tell_nodes, None)
        self.subscriptions.close()
        self._drop_checkpoint()
        if self._appending is not None:
            self._appending.cancel()
        self._access.give_up_slowed_reads()
        self._large_answers.resume()  # those that wait find the session closed, and end
        for task in self._waiting_fetches:
            task.cancel()
        if self._idle is not None:
            self._idle.set()

    def _drop_checkpoint(self) -> None:
        if self._access.has_checkpoint:
            self._tasks.start(self._access.drop_checkpoint())

    def _close_consumers(self) -> None:
        # When the broker shuts down, unfinished work is delivered again without counting as failed.
        self.consumers.close(is_clean=self._stage is _Stage.DRAINING)

    # --- Frames become requests ---

    def _proceed(self) -> None:
        """Begin requests, in order, until none are left, something blocks them, or the turn is over."""
        frames = self._frames
        left_this_turn = self._request_quota.requests()
        while frames and not self._blocked_by:
            if not left_this_turn:
                self._block(_TURN)
                self._request_quota.waiting += 1
                asyncio.get_running_loop().call_soon(self._begin_turn)
                return
            left_this_turn -= 1
            self._begin(frames.popleft())
        if self._is_input_paused and not self._blocked_by and self._stage is not _Stage.CLOSED:
            self._is_input_paused = False
            self._output.resume_input()
        self._check_idle()

    def _begin_turn(self) -> None:
        self._request_quota.waiting -= 1
        self._unblock(_TURN)

    def _block(self, reason: int) -> None:
        self._blocked_by |= reason
        if not self._is_input_paused and self._stage is not _Stage.CLOSED:
            self._is_input_paused = True
            self._output.pause_input()

    def _unblock(self, reason: int) -> None:
        self._blocked_by &= ~reason
        self._proceed_if_unblocked()

    def _proceed_if_unblocked(self) -> None:
        if not self._blocked_by and self._stage is not _Stage.CLOSED:
            self._proceed()

    def _begin(self, frame: Frame) -> None:
        self._broker.metrics.counters.requests += 1
        try:
            request = wire.decode_request(frame)
        except MalformedError as error:
            self._broker.metrics.counters.protocol_errors += 1
            self.fail(error)
            return
        try:
            if self._stage is _GREETING:
                self._greet(request, frame.tail)
            else:
                self._dispatch(request, frame.tail)
        except RunnelError as error:
            if request_id := id_of(request):
                self._say_error(request_id, error)
            else:
                self.fail(error)  # the frame has no id to answer to
        except Exception as error:  # noqa: BLE001 - the boundary: a bug costs one connection
            self._break_down(id_of(request), error)

    # --- Authentication ---

    def _greet(self, request: wire.Request, tail: memoryview) -> None:
        """Admit the client, or tell it why not and close: a connection has a single attempt."""
        request_id = id_of(request)
        try:
            self._admit(checked_hello(request, tail))
        except UnauthenticatedError as error:
            self._stage = _Stage.REFUSING
            self._block(_PENALTY)  # frames that it has sent already are not read
            self._start(request_id, partial(self._refuse_later, request_id, error))
        except RunnelError as error:
            self._refuse(request_id, error)

    def _admit(self, hello: wire.Hello) -> None:
        client = UNRESTRICTED
        if self._authenticator is not None:
            client = self._authenticated = self._authenticator.admit(hello.token)
            client.on_revoked(self._end_revoked)
        scope = scope_of(hello)
        self._access = self._make_access(client, self._output.peer, scope)
        self._is_in_parts = self._broker.nodes.is_several and scope is not Scope.CLUSTER
        self._stage = _Stage.OPEN
        self.client = hello.client
        self._broker.metrics.counters.connections_opened += 1
        say(self._output, welcome_to(hello, self._settings, self._broker.nodes))

    async def _refuse_later(self, request_id: int, error: UnauthenticatedError) -> None:
        assert self._authenticator is not None
        await self._authenticator.penalty(error, self._output.peer)
        self._refuse(request_id, error)

    def _refuse(self, request_id: int, error: RunnelError) -> None:
        self._broker.metrics.counters.connections_refused += 1
        self._say_error(request_id, error)
        self.close()

    def _end_revoked(self, error: RunnelError) -> None:
        self.consumers.close(is_clean=True)  # their work has not failed
        self.fail(error)

    # --- Requests become verbs ---

    def _dispatch(self, request: wire.Request, tail: memoryview) -> None:
        if isinstance(request, wire.Publish):
            self._publish(request, tail)
            return
        check_no_tail(request, tail)
        match request:
            case wire.Credit():
                credit_bytes = request.credit_bytes - request.less_bytes
                self.subscriptions.grant(request.subscription, credit_bytes)
            case work.Ack() | work.AckUpTo():
                answer = self.consumers.ack(request)
                if answer is not None:
                    self._start(request.id, answer)
            case (
                work.Nack()
                | work.GiveBack()
                | work.Renew()
                | work.Recalled()
                | work.Window()
                | work.WindowShare()
                | work.Leave()
            ):
                self.consumers.handle(request)
            case wire.Send():
                self._send(request)
            case wire.Subscribe():
                self._check_open()
                count_max = self._settings.native.subscriptions_max
                self.subscriptions.prepare(request.subscription, count_max)
                opening = partial(
                    self.subscriptions.open,
                    self._access,
                    request,
                    is_in_parts=self._is_in_parts,
                )
                self._start(request.id, opening)
            case wire.Unsubscribe():
                self.subscriptions.unsubscribe(request)
            case wire.ShardsFrom():
                self._start(
                    request.id, partial(self.subscriptions.begin_shards, self._access, request)
                )
            case work.Consume() | work.ConsumePart():
                self._check_open()
                self.consumers.prepare(request.consumer, self._settings.native.consumers_max)
                self._start(request.id, partial(self.consumers.open, self._access, request))
            case wire.FetchShard():
                self._check_open()
                self._start(request.id, partial(self._reply_large, None, request))
            case wire.Fetch():
                self._check_open()
                task = self._start(request.id, partial(self._reply_large, None, request))
                if request.wait_ms:
                    self._waiting_fetches.add(task)
                    task.add_done_callback(self._waiting_fetches.discard)
            case wire.Nodes():
                self._broker.nodes.listeners[self._tell_nodes] = None
                self._answer(request)
            case wire.AsOf():
                self._as_of = request.stamp
            case wire.Hello():
                raise HandshakeError("hello was said already; it is the first frame and no other")
            case _:
                self._answer(request)

    def _tell_nodes(self) -> None:
        """Nodes have changed, and the client has asked for them once."""
        nodes = self._broker.nodes
        say(self._output, wire.NodeList(0, nodes.version, nodes.nodes))

    def _answer(
        self, request: verbs.PromptRequest | verbs.ListRequest | verbs.SmallRequest
    ) -> None:
        if isinstance(request, verbs.PromptRequest):
            reply = verbs.reply_to(self._access, request)
            say(self._output, reply.head, reply.tail)
            return
        as_of, self._as_of = self._as_of, None
        if isinstance(request, verbs.ListRequest):
            self._start(request.id, partial(self._reply_large, as_of, request))
        else:
            self._start(request.id, partial(self._reply_later, as_of, request))

    def _check_open(self) -> None:
        if self._stage is _DRAINING:
            raise _shutting_down()

    # --- Publishing ---

    def _publish(self, request: wire.Publish, tail: memoryview) -> None:
        self._check_open()
        level = None if request.level is None else Level.checked(request.level)
        batch = only_batch(tail)
        self.messages_in += len(batch)
        self._append(request.id, level, batch, partial(self._access.publish, batch, level))

    def _send(self, request: wire.Send) -> None:
        self._check_open()
        level = None if request.level is None else Level.checked(request.level)
        self.messages_in += 1
        message = message_of(request)
        append = partial(self._access.send, message, level, partition=request.partition)
        self._append(request.id, level, request, append)

    def _append(
        self,
        request_id: int,
        level: Level | None,
        given: Batch | wire.Send,
        append: Callable[[], asyncio.Future[Published]],
    ) -> None:
        try:
            published = append()
        except BusyError:
            # Later frames wait too: the order of a connection's publishes is a promise.
            self._block(_ROOM)
            waiting = partial(self._append_later, request_id, level, _place_of(given), append)
            self._appending = self._start(request_id, waiting)
            self._appending.add_done_callback(self._on_appended)
        else:
            self._answer_when_published(request_id, level, published)

    def _on_appended(self, _: asyncio.Task[None]) -> None:
        self._appending = None
        self._unblock(_ROOM)

    async def _append_later(
        self,
        request_id: int,
        level: Level | None,
        place: tuple[str, int | None],
        append: Callable[[], asyncio.Future[Published]],
    ) -> None:
        """Retry a publish that met a full queue, whenever there is room, until it succeeds."""
        while True:
            await self._access.wait_room(*place)
            if self._stage is _Stage.CLOSED:
                return
            try:
                published = append()
            except BusyError:
                continue
            self._answer_when_published(request_id, level, published)
            return

    def _answer_when_published(
        self, request_id: int, level: Level | None, published: asyncio.Future[Published]
    ) -> None:
        """Answer when the message is published: a callback, which is cheaper than a task."""
        if published.done():
            self._say_published(request_id, level, published)
        else:
            self._count_unanswered()
            published.add_done_callback(partial(self._on_published, request_id, level))

    def _on_published(
        self, request_id: int, level: Level | None, published: asyncio.Future[Published]
    ) -> None:
        self._say_published(request_id, level, published)
        self._count_answered()

    def _say_published(
        self, request_id: int, level: Level | None, published: asyncio.Future[Published]
    ) -> None:
        if published.cancelled():
            self._say_error(request_id, ClosedError("the broker was closed before it was stored"))
        elif (error := published.exception()) is None:
            if level is not _NONE:
                head = published_answer(request_id, published.result())
                self._output.queue(wire.encode(head))
        elif isinstance(error, RunnelError):
            self._say_error(request_id, error)
        else:
            self._break_down(request_id, error)

    # --- Requests that wait ---

    def _start(self, request_id: int, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        self._count_unanswered()
        task = self._tasks.start(self._run(request_id, work))
        task.add_done_callback(partial(self._on_ended, request_id))
        return task

    async def _run(self, request_id: int, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except RunnelError as error:
            self._say_error(request_id, error)
        except Exception as error:  # noqa: BLE001 - the boundary: a bug costs one connection
            self._break_down(request_id, error)

    def _on_ended(self, request_id: int, task: asyncio.Task[None]) -> None:
        # Here and not in the task: a task that is cancelled early never begins.
        if task.cancelled():
            self._say_error(request_id, _shutting_down())
        self._count_answered()

    async def _reply_later(self, as_of: int | None, request: verbs.SmallRequest) -> None:
        reply = await verbs.wait_reply_as_of(self._access, as_of, request)
        if self._stage is _Stage.CLOSED:
            self._drop_checkpoint()  # the client that it was made for is gone
        say(self._output, reply.head, reply.tail)

    async def _reply_large(self, as_of: int | None, request: verbs.WaitingRequest) -> None:
        async with LargeAnswer(self._large_answers) as answer:
            if self._ends_when_idle and self._access.is_slowed_out:
                self._fail_slowed()
            if self._stage is not _Stage.CLOSED:
                reply = await verbs.wait_reply_as_of(self._access, as_of, request, answer.suspended)
                self._messages_fetched += reply.messages
                say(self._output, reply.head, reply.tail)

    def _count_unanswered(self) -> None:
        self._unanswered += 1
        if self._unanswered >= self._settings.native.requests_max:
            self._block(_ANSWERS)

    def _count_answered(self) -> None:
        """A request was answered."""
        self._unanswered -= 1
        if self._blocked_by & _ANSWERS:
            self._unblock(_ANSWERS)
        else:
            self._check_idle()

    def _check_idle(self) -> None:
        if self._frames:
            return
        if self._ends_when_idle:
            self._close_consumers()  # they cannot acknowledge any more, even if answers are outstanding
        if self._unanswered:
            return
        if self._idle is not None:
            self._idle.set()
            self._idle = None
        if self._ends_when_idle:
            self.close()

    # --- Failures ---

    def _say_error(self, request_id: int, error: RunnelError) -> None:
        if self._stage is _Stage.CLOSED:
            return
        counters = self._broker.metrics.counters
        counters.requests_failed += 1
        say(self._output, error_answer(request_id, error))
        if isinstance(error, HandshakeError):
            counters.protocol_errors += 1
            self.close()

    def _break_down(self, request_id: int, error: BaseException) -> None:
        """Close this connection after a bug of ours. Other connections continue."""
        logger.error("a session failed", peer=self._output.peer, exc_info=error)
        if self._stage is not _Stage.CLOSED:
            self._broker.metrics.counters.requests_failed += 1
            say(self._output, error_answer(request_id, error))
            self.close()


def _shutting_down() -> ClosedError:
    return ClosedError("the broker is shutting down; connect again later")


def _place_of(given: Batch | wire.Send) -> tuple[str, int | None]:
    """The topic and partition of the first message; without a partition the broker chooses it."""
    if isinstance(given, wire.Send):
        return given.topic, given.partition
    head = given.envelope
    return head.topics[0], head.column32(head.partitions)[0]
