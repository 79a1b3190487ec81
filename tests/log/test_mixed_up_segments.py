"""Segments in each other's place, as a careless copy leaves them: damage that is told, not an internal error."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from runnel.config import LogSettings, Rotate, Settings, TopicRule
from runnel.embedded import Broker

SMALL = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=2000))
SETTINGS = Settings(log=LogSettings(allocate_bytes=4096, disk_reserve_bytes=0), topics=(SMALL,))
COUNT = 63  # nine full segments, all of one size


def test_segment_in_the_place_of_the_last_is_a_gap_that_names_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Broker.open(tmp_path, settings=SETTINGS) as broker, broker.connect() as bus:
            for number in range(COUNT):
                await bus.publish("a", b"%02d" % number + b"." * 20)
        segments = sorted((tmp_path / "journals" / "main" / "0").glob("*.segment"))
        last = segments[-1]
        shutil.copyfile(segments[-3], last)
        async with Broker.open(tmp_path, settings=SETTINGS) as broker, broker.connect() as bus:
            offset, served, problems = 1, [], []
            while offset <= COUNT:
                page = await bus.fetch("a", offset)
                served += [(message.offset, message.payload[:2]) for message in page.messages]
                problems += [gap.text for gap in page.gaps]
                offset = page.next_offset
            assert served == [(number + 1, b"%02d" % number) for number in range(len(served))]
            assert len(served) < COUNT
            assert problems
            assert all(last.name in problem for problem in problems)
            assert (await bus.publish("a", b"goes on")).offset == COUNT + 1

    asyncio.run(scenario())
