"""Which file systems several processes may share: by the table of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from runnel.platform import file_systems
from runnel.platform.file_systems import file_system, is_network, network_file_system

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 27 0:40 / /mnt/shared rw,relatime shared:2 master:1 - nfs4 server:/export rw,vers=4.2
31 30 8:2 / /mnt/shared/local rw - xfs /dev/sdb1 rw
32 27 0:41 / /mnt/with\\040blank rw - cifs //server/share rw
33 27 0:42 / /mnt/ssh rw - fuse.sshfs host: rw
34 27 0:43 / /mnt/twice rw - nfs server:/a rw
35 27 8:3 / /mnt/twice rw - btrfs /dev/sdc rw
a line that makes no sense
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/var/lib/runnel", "ext4"),
        ("/mnt/shared", "nfs4"),
        ("/mnt/shared/data", "nfs4"),
        ("/mnt/sharedbutnot", "ext4"),
        ("/mnt/shared/local/data", "xfs"),
        ("/mnt/with blank/data", "cifs"),
        ("/mnt/ssh/data", "fuse.sshfs"),
        ("/mnt/twice/data", "btrfs"),
    ],
)
def test_innermost_mount_decides(path: str, kind: str) -> None:
    assert file_system(path, MOUNTS) == kind


def test_kinds_whose_files_lie_elsewhere() -> None:
    for kind in ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs", "fuse.s3fs"):
        assert is_network(kind)
    for kind in ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "fuse.fuse-overlayfs", "apfs"):
        assert not is_network(kind)


def test_path_that_does_not_exist_yet_lies_where_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"30 27 0:40 / {tmp_path} rw - nfs4 server:/export rw\n")
    monkeypatch.setattr(file_systems, "_MOUNTS", str(mounts))
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    for path in (tmp_path / "data", link / "data"):
        assert network_file_system(str(path)) == "nfs4"
    assert network_file_system("/elsewhere") is None


def test_system_without_a_table_of_mounts_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "_MOUNTS", "/there/is/none")
    assert network_file_system("/") is None
