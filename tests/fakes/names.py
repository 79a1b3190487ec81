"""The directory tree of the fake disk, and which names survive a crash.

Creations, renames and removals are pending until their directory is synced. A crash keeps any of them, each completely,
if it also keeps all earlier changes of the same name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from random import Random

from tests.fakes.inode import Inode


class Directory:
    """A directory: the running system sees `entries`, the platter has `durable`."""

    def __init__(self) -> None:
        self.entries: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}


Node = Inode | Directory
Place = tuple[Directory, str]
NameChange = dict[Place, Node | None]  # None: the name is removed


def os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class Tree:
    """All directories and files. Paths begin at the root, with a slash or without."""

    def __init__(self) -> None:
        self.root = Directory()
        self._pending: list[NameChange] = []

    def find(self, path: str) -> Node | None:
        node: Node | None = self.root
        for name in _parts(path):
            if not isinstance(node, Directory):
                return None
            node = node.entries.get(name)
        return node

    def file(self, path: str) -> Inode:
        node = self.find(path)
        if node is None:
            raise os_error(errno.ENOENT, path)
        if isinstance(node, Directory):
            raise os_error(errno.EISDIR, path)
        return node

    def directory(self, path: str) -> Directory:
        node = self.find(path)
        if node is None:
            raise os_error(errno.ENOENT, path)
        if isinstance(node, Inode):
            raise os_error(errno.ENOTDIR, path)
        return node

    def create(self, path: str) -> Inode:
        place = self._place(path)
        if self.find(path) is not None:
            raise os_error(errno.EEXIST, path)
        inode = Inode()
        self._change({place: inode})
        return inode

    def make_directory(self, path: str) -> None:
        """Make this directory durably; its parent has to exist. No error if it exists already."""
        directory, name = place = self._place(path)
        if isinstance(directory.entries.get(name), Inode):
            raise os_error(errno.EEXIST, path)
        if name not in directory.entries:
            self._change({place: Directory()})
        # Only this entry: other names in the parent wait for a sync of their own.
        self._commit([change for change in self._pending if place in change])

    def rename(self, source: str, target: str) -> None:
        node = self.find(source)
        if node is None:
            raise os_error(errno.ENOENT, source)
        replaced = self.find(target)
        if replaced is node:
            return
        if isinstance(replaced, Directory):
            if isinstance(node, Inode):
                raise os_error(errno.EISDIR, target)
            if replaced.entries:
                raise os_error(errno.ENOTEMPTY, target)
        elif isinstance(replaced, Inode) and isinstance(node, Directory):
            raise os_error(errno.ENOTDIR, target)
        self._change({self._place(source): None, self._place(target): node})

    def remove(self, path: str) -> None:
        node = self.find(path)
        if node is None:
            raise os_error(errno.ENOENT, path)
        if isinstance(node, Directory) and node.entries:
            raise os_error(errno.ENOTEMPTY, path)
        self._change({self._place(path): None})

    def sync(self, path: str) -> None:
        synced = self.directory(path)
        self._commit([c for c in self._pending if any(place[0] is synced for place in c)])

    def crash(self, random: Random) -> None:
        """Keep some of the pending names; then crash every file that is left."""
        self._commit([change for change in self._pending if random.random() < 0.5])
        self._pending.clear()
        _forget_volatile(self.root)
        for inode in self.inodes():
            inode.crash(random)

    def inodes(self) -> Iterator[Inode]:
        """All files that have a name, always in the same order."""
        directories = [self.root]
        while directories:
            for _, node in sorted(directories.pop().entries.items()):
                if isinstance(node, Directory):
                    directories.append(node)
                else:
                    yield node

    def missing(self, path: str) -> list[str]:
        """The directories above `path` that do not exist, outermost first."""
        parts = _parts(path)
        above = ["/".join(parts[:depth]) for depth in range(1, len(parts))]
        return [directory for directory in above if self.find(directory) is None]

    def _place(self, path: str) -> Place:
        *above, name = _parts(path)
        return self.directory("/".join(above)), name

    def _change(self, change: NameChange) -> None:
        for (directory, name), node in change.items():
            _set(directory.entries, name, node)
        self._pending.append(change)

    def _commit(self, chosen: list[NameChange]) -> None:
        """Make these changes durable, with all earlier changes of the same names."""
        wanted = {id(change) for change in chosen}
        committed: list[NameChange] = []
        places: set[Place] = set()
        for change in reversed(self._pending):
            if id(change) in wanted or not places.isdisjoint(change):
                places.update(change)
                committed.append(change)
        for change in reversed(committed):
            self._pending = [waiting for waiting in self._pending if waiting is not change]
            for (directory, name), node in change.items():
                _set(directory.durable, name, node)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _set(entries: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _forget_volatile(directory: Directory) -> None:
    directory.entries = dict(directory.durable)
    for node in directory.entries.values():
        if isinstance(node, Directory):
            _forget_volatile(node)
