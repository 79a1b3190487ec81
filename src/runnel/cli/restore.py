"""`runnel restore`: a copy becomes a data directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runnel.cli.copies import tell_copy, tell_damage, verified
from runnel.errors import ClientFault, LockedError
from runnel.log import copying
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
            metavar="DATA_DIR", help="The data directory; it must not exist, or be empty."
        ),
    ],
) -> None:
    """Make a data directory of a copy, after verifying the copy.

    The copy stays as it is. The new directory begins an epoch of its own, so that what is stored in
    it is never taken for what the original stored after the copy was made. Start a broker on it with
    `runnel serve --data DATA_DIR`; the files have to belong to the broker's user.
    """
    source, target = Path(backup).absolute(), Path(directory).absolute()
    if not source.is_dir():
        raise ClientFault(f"{source} is not a directory")
    holder = OfflineLog(str(source)).holder()
    if holder is not None:
        raise LockedError(
            f"{source} is in use by process {holder.pid}: restore from a copy that nobody has open"
        )
    copying.check_target(target, beside=source)
    found = verified(source)
    if found.damage:
        tell_damage(found)
        raise ClientFault(
            f"{source} is damaged in {len(found.damage)} places; take another copy, or, if there is none, `cp -a` it "
            "to the new place: a broker serves what is whole"
        )
    files = copying.files_of(source)
    copying.check_room(target, files)
    with copying.new_copy(target) as unfinished:
        copied = copying.copy_files(source, unfinished, files)
        copying.begin_epoch(RealDisk(), unfinished)
        found = verified(unfinished)
    tell_copy(target, copied, found)
