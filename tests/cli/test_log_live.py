"""`runnel log` beside a running writer: its reports are true, and it does not disturb the writer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runnel.cli.main import run
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.platform.clock import SystemClock
from runnel.platform.workers import ThreadWorkers
from tests.cli.data_directory import open_log

WRITER = """
import asyncio, sys
from pathlib import Path
from runnel.config import Rotate, TopicRule
from runnel.formats.batch import Batch
from runnel.formats.message import Message
from runnel.platform.clock import SystemClock
from runnel.platform.workers import ThreadWorkers
from tests.cli.data_directory import open_log

RULE = TopicRule(match="*", journal="main", rotate=Rotate(bytes_max=100_000))


async def main():
    workers = ThreadWorkers(1)
    log = await open_log(Path(sys.argv[1]), workers, RULE, SystemClock())
    loop = asyncio.get_running_loop()
    number = 0
    # A line in: begin to write as fast as may be. The end of input: stop.
    while await loop.run_in_executor(None, sys.stdin.readline):
        print("writing", flush=True)
        flying = []
        for _ in range(200):
            messages = [Message("a", b"%d" % (number + row)) for row in range(10)]
            number += len(messages)
            flying.append(log.append(Batch.from_messages(messages)))
            if len(flying) >= 4:
                await flying.pop(0)
        await asyncio.gather(*flying)
    await log.close()
    workers.close()
    print(number, flush=True)


asyncio.run(main())
"""


def exported(path: Path) -> list[int]:
    return [int(json.loads(line)["payload"]) for line in path.read_text().splitlines()]


def test_directory_of_this_process_is_read_while_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, target = tmp_path / "data", tmp_path / "out.jsonl"

    async def scenario() -> None:
        workers = ThreadWorkers(1)
        try:
            log = await open_log(directory, workers, clock=SystemClock())
            for number in range(1, 31):
                await log.append(Batch.from_messages([Message("a", b"%d" % number)] * 3))
                await log.sync()
                assert run(["log", "verify", str(directory)]) == 0
                assert run(["log", "export", str(directory), "--to", str(target)]) == 0
                assert len(exported(target)) == 3 * number
            await log.close()
        finally:
            workers.close()

    asyncio.run(scenario())
    assert "note" not in capsys.readouterr().out


@pytest.mark.slow
def test_directory_of_another_process_is_read_while_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, target = tmp_path / "data", tmp_path / "out.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for turn in range(6):
            writer.stdin.write("go on\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "writing\n"
            assert run(["log", "verify", str(directory)]) == 0, capsys.readouterr().out
            assert run(["log", "export", str(directory), "--to", str(target)]) == 0
            numbers = exported(target)
            # From the first on without a gap, all that was acknowledged in earlier turns; for the last
            # group the mark may vouch, which the next write is just replacing.
            assert numbers == list(range(len(numbers)))
            assert len(numbers) >= turn * 2000 - 40
            capsys.readouterr()
            assert run(["log", "inspect", str(directory), "--json"]) == 0
            shown = json.loads(capsys.readouterr().out)
            assert shown["open_in_process"] == {"pid": writer.pid, "is_certain": True}
            assert shown["damage"] == []
        writer.stdin.close()
        total = int(writer.stdout.readline())
        assert writer.wait() == 0
    assert total == 6 * 200 * 10
    assert run(["log", "export", str(directory), "--to", str(target)]) == 0
    assert exported(target) == list(range(total))
