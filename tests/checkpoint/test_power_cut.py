"""A model of a disk that forgets what was not synced: cut off at any call, it holds the old state or the new one.

Files keep what they had at their last fsync, or with luck more; names in a directory change as they were synced, and of
the later changes any selection may have reached the disk.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import monograph as mg
from monograph.checkpoint import write as writing
from tests.checkpoint.same import difference
from tests.checkpoint.system_calls import NAMES


@dataclass
class File:
    """What was written, and how much of it is safe."""

    data: bytearray = field(default_factory=bytearray)
    synced: int = 0


@dataclass
class Directory:
    """Names, the changes that led to them, and how many of those are safe."""

    names: dict[str, File | Directory] = field(default_factory=dict)
    changes: list[dict[str, File | Directory | None]] = field(default_factory=list)
    synced: int = 0

    def change(self, **changed: File | Directory | None) -> None:
        self.changes.append(changed)
        self.names = replayed(self.changes)


def replayed(changes: list[dict[str, File | Directory | None]]) -> dict[str, File | Directory]:
    """The names after some changes."""
    names: dict[str, File | Directory | None] = {}
    for change in changes:
        names |= change
    return {name: node for name, node in names.items() if node is not None}


class Disk:
    """Follows the calls of a save below a root."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Directory()
        self.opened: dict[int, File | Directory] = {}

    def place(self, path: object, dir_fd: int | None = None) -> tuple[Directory, str]:
        """The directory that a path lies in, and its name there."""
        if dir_fd is not None:
            return self.opened[dir_fd], str(path)
        *parents, name = Path(str(path)).relative_to(self.root).parts
        directory = self.top
        for parent in parents:
            directory = directory.names[parent]
        return directory, name

    def node(self, path: object, dir_fd: int | None) -> File | Directory:
        if dir_fd is None and Path(str(path)) == self.root:
            return self.top
        directory, name = self.place(path, dir_fd)
        return directory.names[name]

    def open(self, fd: int, path: object, flags: int, *_mode: int, dir_fd: int | None = None) -> None:
        if flags & os.O_CREAT:
            directory, name = self.place(path, dir_fd)
            directory.change(**{name: File()})
        self.opened[fd] = self.node(path, dir_fd)

    def close(self, _result: None, fd: int) -> None:
        self.opened.pop(fd)

    def write(self, done: int, fd: int, data: memoryview) -> None:
        self.opened[fd].data += bytes(data)[:done]

    def fsync(self, _result: None, fd: int) -> None:
        node = self.opened[fd]
        node.synced = len(node.data) if isinstance(node, File) else len(node.changes)

    def rename(
        self, _result: None, source: object, target: object, *, src_dir_fd=None, dst_dir_fd=None
    ) -> None:
        directory, old = self.place(source, src_dir_fd)
        same, new = self.place(target, dst_dir_fd)
        assert same is directory
        directory.change(**{old: None, new: directory.names[old]})

    def mkdir(self, _result: None, path: object, _mode: int = 0o777) -> None:
        directory, name = self.place(path)
        directory.change(**{name: Directory()})

    def unlink(self, _result: None, path: object, *, dir_fd: int | None = None) -> None:
        directory, name = self.place(path, dir_fd)
        directory.change(**{name: None})

    def rmdir(self, _result: None, path: object) -> None:
        self.unlink(None, path)

    def listdir(self, *_args: object) -> None:
        pass

    def survivors(self, target: Path, choice: random.Random, luck: float) -> None:
        """Write what a power cut may leave; `luck` is the share of what was not synced that is there all the same."""
        write_directory(self.top, target, choice, luck)


def write_directory(directory: Directory, target: Path, choice: random.Random, luck: float) -> None:
    target.mkdir()
    safe, later = directory.changes[: directory.synced], directory.changes[directory.synced :]
    for name, node in replayed(safe + [change for change in later if choice.random() < luck]).items():
        if isinstance(node, Directory):
            write_directory(node, target / name, choice, luck)
        else:
            unsafe = len(node.data) - node.synced
            kept = unsafe if choice.random() < luck else choice.randrange(unsafe + 1) if luck else 0
            (target / name).write_bytes(node.data[: node.synced + kept])


@contextmanager
def following(disk: Disk, after_each: Callable[[], None]) -> Iterator[None]:
    """Let a disk follow the calls, and do something after each that may have changed it."""
    plain = {name: getattr(os, name) for name in NAMES}

    def wrapper(name):
        def call(*args, **options):
            result = plain[name](*args, **options)
            if name in ("write", "fsync", "close"):
                ours = args[0] in disk.opened
            else:
                ours = any(fd is not None for fd in options.values()) or Path(str(args[0])).is_relative_to(
                    disk.root
                )
            if ours:
                getattr(disk, name)(result, *args, **options)
                plain_calls(after_each)
            return result

        return call

    def plain_calls(function):
        set_calls(plain)
        try:
            function()
        finally:
            set_calls(ours)

    ours = {name: wrapper(name) for name in NAMES}
    set_calls(ours)
    try:
        yield
    finally:
        set_calls(plain)


def set_calls(functions: dict[str, Callable[..., object]]) -> None:
    for name, function in functions.items():
        setattr(os, name, function)


STATES = [{"n": n, "x": torch.full((400,), n), "y": torch.full((100,), float(n))} for n in range(4)]


@pytest.mark.parametrize("saves", [[0], [0, 1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("way", ["path", "manager"])
def test_a_power_cut_at_any_call(way, saves, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 1500)
    root = tmp_path / "disk"
    root.mkdir()
    disk, choice, cuts = Disk(root), random.Random(0), [0]
    manager = mg.CheckpointManager(root, keep=1)

    def save(n):
        if way == "path":
            mg.save(STATES[n], root / "last", overwrite=True)
        else:
            manager.save(STATES[n], step=n)

    def check(allowed):
        for luck in (0.0, 1.0, 0.5, 0.5, 0.5):
            target = tmp_path / f"cut-{cuts[0]}"
            cuts[0] += 1
            disk.survivors(target, choice, luck)
            assert newest(way, target) in allowed

    for n in saves[:-1]:
        with following(disk, lambda: None):
            save(n)
    before, last = (saves[-2] if len(saves) > 1 else None), saves[-1]
    with following(disk, lambda: check((before, last))):
        save(last)
    check((last,))
    assert cuts[0] > 100


def newest(way, target):
    """The number of the state that can be loaded, every bit of it right; None if there is none."""
    if way == "path":
        path = target / "last"
        if not path.exists():
            return None
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            path = mg.CheckpointManager(target).latest()
        if path is None:
            return None
    loaded = mg.load(path)
    assert difference(STATES[loaded["n"]], loaded) is None
    return loaded["n"]
