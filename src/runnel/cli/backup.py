"""`runnel backup`: a consistent copy of a running broker, verified."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runnel.cli.connecting import DEFAULT_URL, Url, run_connected
from runnel.cli.copies import tell_copy, verified
from runnel.errors import ClientFault, Unavailable
from runnel.log import checkpoint as checkpoints
from runnel.log import copying

if TYPE_CHECKING:
    from runnel.client import Bus
    from runnel.log.reading import Verified

app = typer.Typer(add_completion=False)


@app.command()
def backup(
    directory: Annotated[
        str,
        typer.Argument(metavar="DIR", help="Where the copy goes; it must not exist, or be empty."),
    ],
    *,
    url: Url = DEFAULT_URL,
) -> None:
    """Copy the data directory of a running broker, as of one moment, and verify the copy.

    Run it on the broker's machine, as a user who may read its data directory; with tokens it needs
    the right admin:*. Publishers wait while the moment is taken, which is as long as a link for each
    file takes; then the broker serves as ever, and retention goes on.

    The copy is made as DIR.unfinished and renamed when it is whole. `runnel restore` puts it to use.
    Exit code 1: the copy is whole, and something in it is damaged.
    """
    target = Path(directory).absolute()
    tell_copy(target, *run_connected(url, lambda bus: _copy(bus, target)))


async def _copy(bus: Bus, target: Path) -> tuple[int, Verified]:
    path, checkpoint_id = await bus.checkpoint()
    source = Path(path)
    try:
        is_ours = checkpoints.read_contents(source).id == checkpoint_id
    except OSError as error:
        raise ClientFault(
            f"{source}, where the broker has its files, cannot be read here ({error.strerror}): run this on the "
            "broker's machine, as a user who may read its data directory"
        ) from None
    if not is_ours:
        raise ClientFault(f"{source} is not the broker's: run this on the machine that it runs on")
    copying.check_target(target, beside=source.parent)
    # In a thread, so that the connection stays alive: the broker keeps the files for as long as it is.
    return await asyncio.to_thread(_copy_files, source, target)


def _copy_files(source: Path, target: Path) -> tuple[int, Verified]:
    try:
        files = list(checkpoints.files_of(source))
        copying.check_room(target, files)
        with copying.new_copy(target) as unfinished:
            return copying.copy_files(source, unfinished, files), verified(unfinished)
    except FileNotFoundError as error:
        raise Unavailable(
            f"the broker has let go of the files ({error.filename} is gone): it ended, or the connection was lost; "
            "try again"
        ) from None
