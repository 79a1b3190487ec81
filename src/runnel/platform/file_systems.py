"""Which kind of file system a path lies on, as far as the system tells: locks on network file systems do not hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_MOUNTS: Final = "/proc/self/mountinfo"  # of Linux; nowhere else is a file system refused
_NETWORK: Final = frozenset(
    (
        *("9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs2", "glusterfs", "gpfs"),
        *("lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3", "smbfs"),
    )
)
_NETWORK_FUSE: Final = frozenset(
    (
        *("blobfuse", "blobfuse2", "ceph", "davfs2", "gcsfuse", "glusterfs", "goofys", "juicefs"),
        *("mountpoint-s3", "rclone", "s3fs", "seaweedfs", "sshfs"),
    )
)
_TYPE_BEHIND: Final = " - "  # optional fields of any number end with it


def network_file_system(path: str) -> str | None:
    """The type of the network file system that the path lies on, or will lie on; None if it is none. Blocks."""
    try:
        mounts = Path(_MOUNTS).read_text()
    except OSError:
        return None
    found = file_system(os.path.realpath(path), mounts)
    return found if found is not None and is_network(found) else None


def is_network(file_system_type: str) -> bool:
    """Whether files of this type lie on other machines."""
    kind, _, behind = file_system_type.partition(".")
    if kind in ("fuse", "fuseblk"):
        return behind in _NETWORK_FUSE
    return file_system_type in _NETWORK


def file_system(path: str, mounts: str) -> str | None:
    """The type of the file system of an absolute path, by a table of mounts as `/proc/self/mountinfo` has it."""
    found, longest = None, -1
    for line in mounts.splitlines():
        place, _, behind = line.partition(_TYPE_BEHIND)
        fields = place.split()
        if len(fields) < 5 or not behind:
            continue
        mount = fields[4].encode().decode("unicode_escape").rstrip("/")
        is_on = path == mount or path.startswith(f"{mount}/")
        if is_on and len(mount) >= longest:  # a later mount hides an earlier one at the same place
            found, longest = behind.split()[0], len(mount)
    return found
