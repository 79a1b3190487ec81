"""The last act of some histories: one bit of a stored file flips, and the log has to say so, or not to mind.

Whatever the bit was part of, nothing wrong is served and nothing else is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnel.errors import FormatVersionError, MalformedError
from runnel.formats.batch import Batch
from runnel.log.segments import paths
from runnel.log.segments.segment import HEADER_BYTES, read_block
from tests.fakes.disk import FakeDisk
from tests.fakes.names import Directory
from tests.log.simulation.checks import check_everything
from tests.simulation.history import Violation

if TYPE_CHECKING:
    from tests.log.simulation.history import History


async def damage_something(history: History) -> None:
    """While the log is closed, or after a kill, or under its eyes."""
    random = history.random
    for _ in range(random.randint(0, 4)):
        await history.traffic.append_surely()
    await check_everything(history)
    how = random.choice(("closed", "killed", "live"))
    if how == "closed":
        await history.close()
    elif how == "killed":
        await history.kill_quietly()
    files = _files(history.disk, history.plan.settings.data)
    path = random.choice(sorted(path for path, content in files.items() if content))
    position = random.randrange(len(files[path]))
    bit = random.randrange(8)
    history.say(f"bit {bit} of {path}:{position} flips while the log is {how}")
    history.disk.flip_bit(path, position, bit)
    history.is_damaged = True
    if path.endswith(paths.FORMAT_FILE):
        await _expect_refusal(history, path, position, bit, is_live=how == "live")
        return
    is_metadata = f"/{paths.METADATA}/" in path
    lost = _payloads_at(files[path], position) if path.endswith(paths.SEGMENT_SUFFIX) else set()
    history.model.lost |= lost
    must_be_met = history.model.is_any_required(lost)
    if is_metadata:
        history.model.metadata_was_damaged()
    elif f"/{paths.CATALOGUE}/" in path:
        history.model.catalogue_was_damaged()
    if how != "live":
        await history.open()
    await check_everything(history)
    log = history.log
    reports = [*log.recovered.damage, *log.recovered.torn, *log.statistics().damage]
    is_reported = any(report.startswith(path) for report in reports)
    if must_be_met and not is_reported:
        raise Violation(f"nobody was told of the damage in {path}:{position}, only: {reports}")
    if is_metadata and how != "live" and not is_reported:
        history.model.check_cursors_were_kept(log.metadata.cursors.all())
    await history.traffic.append_surely()
    await check_everything(history)


async def _expect_refusal(
    history: History, path: str, position: int, bit: int, *, is_live: bool
) -> None:
    """A format that this Runnel does not know is refused, whatever made it so."""
    if is_live:
        return
    try:
        await history.open()
    except FormatVersionError as error:
        history.say(f"   {error}")
        history.disk.flip_bit(path, position, bit)
        await history.open()
        await check_everything(history)


def _files(disk: FakeDisk, directory: str) -> dict[str, bytes]:
    """All files below a directory, with their contents."""
    found: dict[str, bytes] = {}
    waiting = [(directory, disk._tree.directory(directory))]
    while waiting:
        path, node = waiting.pop()
        for name, child in node.entries.items():
            if isinstance(child, Directory):
                waiting.append((f"{path}/{name}", child))
            elif name != paths.LOCK_FILE:
                found[f"{path}/{name}"] = bytes(child.content)
    return found


def _payloads_at(content: bytes, position: int) -> set[bytes]:
    """The messages of the block at this position of a segment; none for header, mark and zeros."""
    at = HEADER_BYTES
    while at < len(content):
        try:
            unit = read_block(memoryview(content)[at:], at)
        except MalformedError:
            return set()
        if unit.content is None:
            return set()
        if at <= position < at + unit.size:
            batch = Batch(unit.content.envelope, unit.content.body)
            return {message.payload for message in batch.messages()}
        at += unit.size
    return set()
