"""CIFAR-10 and CIFAR-100, read from the "python version" of their home page."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Dataset

from monograph import DatasetError
from monograph.checkpoint.files import in_place_of
from monograph.checkpoint.save import reason_of
from monograph.flow.vision.datasets._pickles import Array, Refused, read_pickle
from monograph.flow.vision.own.images import pillow_image

HOME_PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
EDGE = 32
PIXELS = 3 * EDGE * EDGE

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Form:
    """The names of a data set's files, and of what is in them."""

    title: str
    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels: str
    classes: str
    names: tuple[str, ...] = ()  # of the classes, for where `meta` is not there


class CIFAR10(Dataset[tuple[Any, Any]]):
    """50,000 images for training, or 10,000 for testing: 32x32, in ten classes.

    Items are pairs of an image (of Pillow; an array [32, 32, 3] where it is not installed) and the number of its class.
    `root` holds the folder `cifar-10-batches-py` or the archive `cifar-10-python.tar.gz`, which `download=True` unpacks.
    Nothing is downloaded: DatasetError says which files are missing, or damaged, and where they come from.
    """

    form: ClassVar = Form(
        title="CIFAR-10",
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        train=("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"),
        test=("test_batch",),
        meta="batches.meta",
        labels="labels",
        classes="label_names",
        names=(
            "airplane",
            "automobile",
            "bird",
            "cat",
            "deer",
            "dog",
            "frog",
            "horse",
            "ship",
            "truck",
        ),
    )

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        download: bool = False,
        source_url: str | None = None,
    ) -> None:
        self.root = Path(root).expanduser()
        self.train, self.transform, self.target_transform = train, transform, target_transform
        batches = self.form.train if train else self.form.test
        files = _files(self.root, self.form, batches, unpack=download, source=source_url)
        self.classes = _classes(files.get(self.form.meta), self.form)
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        read = [_batch(files[name], self.form, num_classes=len(self.classes)) for name in batches]
        rows = np.concatenate([batch.rows for batch in read])
        self.data: Bytes = np.ascontiguousarray(rows.reshape(-1, 3, EDGE, EDGE).transpose(0, 2, 3, 1))
        self.targets: list[int] = [label for batch in read for label in batch.labels]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image, target = pillow_image(self.data[index]), self.targets[index]
        return (
            image if self.transform is None else self.transform(image),
            target if self.target_transform is None else self.target_transform(target),
        )

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        part = "train" if self.train else "test"
        return f'{type(self).__name__}({len(self)} images for {part}, from "{self.root}")'


class CIFAR100(CIFAR10):
    """50,000 images for training, or 10,000 for testing: 32x32, in a hundred classes; else as `CIFAR10`."""

    form: ClassVar = Form(
        title="CIFAR-100",
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        train=("train",),
        test=("test",),
        meta="meta",
        labels="fine_labels",
        classes="fine_label_names",
    )


@dataclass(frozen=True)
class File:
    """The content of a file, and the path to name when it is damaged."""

    path: Path
    content: bytes


@dataclass(frozen=True)
class Batch:
    """Images as rows of red, green and blue planes, and their classes."""

    rows: Bytes
    labels: Sequence[int]


def _files(
    root: Path, form: Form, batches: Sequence[str], *, unpack: bool, source: str | None
) -> Mapping[str, File]:
    """The batches and `meta`, from the folder, or else all from the archive, which `unpack` brings into the folder."""
    folder, archive = root / form.folder, root / form.archive
    names = batches if form.names else (*batches, form.meta)
    if all((folder / name).is_file() for name in names):
        present = dict.fromkeys((*names, form.meta))
        return {
            name: File(folder / name, _content(folder / name))
            for name in present
            if (folder / name).is_file()
        }
    if not archive.is_file():
        raise _missing(root, form, [name for name in names if not (folder / name).is_file()], source)
    wanted = (*form.train, *form.test, form.meta) if unpack else (*batches, form.meta)
    packed = _archived(archive, form, wanted)
    if lacking := [name for name in names if name not in packed]:
        raise _damaged(archive, f"it holds no {', '.join(lacking)}")
    if unpack:
        _unpack(packed, folder)
    return packed


def _unpack(packed: Mapping[str, File], folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
        for name, file in packed.items():
            with in_place_of(folder / name) as new:
                new.write_bytes(file.content)
    except OSError as error:
        raise DatasetError(
            f'cannot unpack to "{folder}": {reason_of(error)}',
            hint="with download=False the archive is read as it is",
        ) from error


def _archived(archive: Path, form: Form, names: Sequence[str]) -> Mapping[str, File]:
    """The contents of an archive's files; no path in it is used to write to."""
    found: dict[str, File] = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                folder, _, name = member.name.removeprefix("./").rpartition("/")
                file = tar.extractfile(member) if member.isreg() else None
                if file is not None and folder == form.folder and name in names:
                    found[name] = File(archive / member.name, file.read())
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise _damaged(archive, reason_of(error)) from error
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _damaged(path, reason_of(error)) from error


def _entries(file: File) -> Mapping[str, Any]:
    try:
        entries = read_pickle(file.content)
    except Refused as error:
        raise _damaged(file.path, f"it asks for {error}, and nothing of it was run") from None
    except Exception as error:  # damaged pickles fail in every way
        raise _damaged(file.path, reason_of(error)) from error
    if not isinstance(entries, dict):
        raise _damaged(file.path, f"it holds a {type(entries).__name__}, not a dict")
    return {_text(key): value for key, value in entries.items()}


def _text(item: Any) -> Any:
    """A string of Python 2 that a later program has written as bytes."""
    return item.decode("latin1") if isinstance(item, bytes) else item


def _batch(file: File, form: Form, *, num_classes: int) -> Batch:
    entries = _entries(file)
    data, labels = entries.get("data"), entries.get(form.labels)
    rows = _value(data, file)
    numbers = _value(labels, file).tolist() if isinstance(labels, Array) else labels
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape[1:] != (PIXELS,):
        raise _damaged(file.path, f"its data are no rows of {PIXELS} bytes")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise _damaged(file.path, f"its {form.labels} are no list of numbers")
    if len(numbers) != len(rows):
        raise _damaged(file.path, f"it has {len(rows)} images and {len(numbers)} {form.labels}")
    if not all(0 <= number < num_classes for number in numbers):
        raise _damaged(file.path, f"its {form.labels} are not from 0 to {num_classes - 1}")
    return Batch(rows, numbers)


def _value(entry: object, file: File) -> Any:
    if not isinstance(entry, Array):
        return entry
    try:
        return entry.value
    except Refused as error:
        raise _damaged(file.path, f"it holds {error}") from None


def _classes(file: File | None, form: Form) -> list[str]:
    if file is None:
        return list(form.names)
    names = _entries(file).get(form.classes)
    names = [_text(name) for name in names] if isinstance(names, list) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _damaged(file.path, f"its {form.classes} are no list of names")
    return names


def _missing(root: Path, form: Form, names: Sequence[str], source: str | None) -> DatasetError:
    return DatasetError(
        f'{form.title} is not in "{root}": no {", ".join(names)} in "{root / form.folder}", and no "{form.archive}"',
        hint=f"nothing is ever downloaded: get {form.archive} from {source or HOME_PAGE} "
        f'("python version") and put it into "{root}"',
    )


def _damaged(path: Path, reason: str) -> DatasetError:
    return DatasetError(f'cannot read "{path}": {reason}', hint=f"get the file again, from {HOME_PAGE}")
