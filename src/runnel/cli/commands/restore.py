"""`runnel restore`: makes a data directory from a backup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runnel.cli.render.copies import tell_copy, tell_damage, verified
from runnel.errors import ClientFault, LockedError
from runnel.log.backup import copies
from runnel.log.reading import OfflineLog
from runnel.platform.disk import RealDisk

app = typer.Typer(add_completion=False)


@app.command()
def restore(
    backup: Annotated[
        str, typer.Argument(metavar="BACKUP", help="A copy made by `runnel backup`.")
    ],
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DATA_DIR", help="New data directory. It must be empty or not exist."
        ),
    ],
) -> None:
    """Verify a backup and make a data directory from it.

    The backup is not changed. The new directory gets an epoch of its own, so that clients never mistake its
    messages for those that the original broker stored after the backup. Start a broker on it with `runnel serve
    --data DATA_DIR`. The files must belong to the broker's user.
    """
    source, target = Path(backup).absolute(), Path(directory).absolute()
    if not source.is_dir():
        raise ClientFault(f"{source} is not a directory")
    holder = OfflineLog(str(source)).holder()
    if holder is not None:
        raise LockedError(
            f"{source} is in use by process {holder.pid}: restore from a copy that nobody has open"
        )
    copies.check_target(target, beside=source)
    found = verified(source)
    if found.damage:
        tell_damage(found)
        raise ClientFault(
            f"{source} is damaged in {len(found.damage)} places; take another copy, or, if there is none, `cp -a` it "
            "to the new place: a broker serves what is whole"
        )
    files = copies.files_of(source)
    copies.check_room(target, files)
    with copies.new_copy(target) as unfinished:
        copied = copies.copy_files(source, unfinished, files)
        copies.begin_epoch(RealDisk(), unfinished)
        found = verified(unfinished)
    tell_copy(target, copied, found)
