"""`runnel backup`: makes a consistent, verified copy of a running broker's data."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runnel.cli.connection import DEFAULT_URL, Url, run_connected
from runnel.cli.render.copies import tell_copy, verified
from runnel.errors import ClientFault, Unavailable
from runnel.log.backup import checkpoint as checkpoints
from runnel.log.backup import copies

if TYPE_CHECKING:
    from runnel.client import Bus
    from runnel.log.reading import Verified

app = typer.Typer(add_completion=False)


@app.command()
def backup(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="Directory for the copy. It must be empty or not exist."
        ),
    ],
    *,
    url: Url = DEFAULT_URL,
) -> None:
    """Copy the data directory of a running broker, as of one moment, and verify the copy.

    Run this on the broker's machine, as a user who may read its data directory. With tokens it needs the right
    admin:*. Publishers wait only while the broker makes a hard link for each file. After that the broker works as
    usual, and retention continues.

    The copy is made as DIR.unfinished and renamed when it is complete. Use it with `runnel restore`. Exit code 1
    means: the copy is complete, but some of the data is damaged.
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
    copies.check_target(target, beside=source.parent)
    # In a thread, so that the connection stays alive: the broker keeps the files while it is connected.
    return await asyncio.to_thread(_copy_files, source, target)


def _copy_files(source: Path, target: Path) -> tuple[int, Verified]:
    try:
        files = list(checkpoints.files_of(source))
        copies.check_room(target, files)
        with copies.new_copy(target) as unfinished:
            return copies.copy_files(source, unfinished, files), verified(unfinished)
    except FileNotFoundError as error:
        raise Unavailable(
            f"the broker has let go of the files ({error.filename} is gone): it ended, or the connection was lost; "
            "try again"
        ) from None
