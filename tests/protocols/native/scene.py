"""A session without a connection: frames in, answers out, and a broker that the test controls."""

from __future__ import annotations

from runnel.config import NativeSettings, Settings
from runnel.formats import wire
from runnel.protocols.native.session import Session
from tests.protocols.native.fake_broker import FakeBroker
from tests.protocols.native.talker import HELLO, Recorder, frames_of, packed, turn


class Scene:
    """A session that has been greeted, with a broker and an output to look at."""

    def __init__(self, native: NativeSettings | None = None, *, greets: bool = True) -> None:
        self.broker = FakeBroker()
        self.output = Recorder()
        settings = Settings(native=native or NativeSettings())
        self.session = Session(self.broker.as_broker, settings, self.output, authenticator=None)
        if greets:
            self.say(packed(HELLO))
            self.output.take()

    def say(self, *frames: bytes) -> None:
        self.session.receive(frames_of(b"".join(frames)))

    def hear(self) -> list[wire.Answer]:
        return self.output.take()

    def ask(self, *frames: bytes | wire.Head) -> list[wire.Answer]:
        self.say(*(packed(each) if isinstance(each, wire.Head) else each for each in frames))
        return self.hear()

    @property
    def is_held_back(self) -> bool:
        return self.output.is_input_paused and self.session.is_held_back

    async def ask_later(self, *frames: bytes | wire.Head) -> list[wire.Answer]:
        first = self.ask(*frames)
        await turn()
        return first + self.hear()
