"""CIFAR-10 from files of its form: read, unpacked, refused; nothing is run, and the network is not touched."""

from __future__ import annotations

import io
import pickle
import pickletools
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import monograph as mg
import monograph.flow.vision as flowvision
from monograph.flow.vision.datasets._pickles import Array, read_pickle
from tests.examples.test_example_data import cifar10_file

CIFAR10 = flowvision.datasets.CIFAR10
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
ROWS = 3


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("a data set wants to use the network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


def pixels(index: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(index).integers(0, 256, (ROWS + index, 3072), dtype=np.uint8)


def labels(index: int) -> list[int]:
    return [(index + row) % 10 for row in range(ROWS + index)]


def contents() -> dict[str, bytes]:
    """The files, the first as Python 2 wrote it and the others as Python 3 does."""
    files = {"data_batch_1": cifar10_file(pixels(0), labels(0))}
    for index, name in enumerate([*TRAIN[1:], "test_batch"], start=1):
        batch = {"batch_label": name, "labels": labels(index), "data": pixels(index)}
        files[name] = pickle.dumps(batch, protocol=index)
    return files | {"batches.meta": pickle.dumps({"num_cases_per_batch": ROWS, "label_names": NAMES}, 2)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, content in contents().items():
        (folder / name).write_bytes(content)
    return tmp_path / "data"


def write_archive(path: Path, files: dict[str, bytes], folder: str = "cifar-10-batches-py") -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def assert_holds(dataset: Any, batches: list[int]) -> None:
    rows = np.concatenate([pixels(index) for index in batches])
    assert np.array_equal(dataset.data, rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    assert dataset.data.dtype == np.uint8
    assert dataset.targets == [label for index in batches for label in labels(index)]
    assert len(dataset) == len(rows)


@pytest.mark.every_case
@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize(("train", "batches"), [(True, [0, 1, 2, 3, 4]), (False, [5])])
def test_files_are_read(root: Path, train: bool, batches: list[int], download: bool) -> None:
    for given in (root, str(root)):
        dataset = CIFAR10(given, train=train, download=download, source_url="https://example.org")
        assert_holds(dataset, batches)
        assert dataset.classes == NAMES
        assert dataset.class_to_idx["cat"] == 3
    assert (
        repr(dataset) == f'CIFAR10({len(dataset)} images for {"train" if train else "test"}, from "{root}")'
    )


def test_files_that_a_later_program_wrote(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    batch = {b"data": pixels(0), b"labels": [np.int64(label) for label in labels(0)], b"batch_label": b"one"}
    (folder / "data_batch_1").write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [name.encode() for name in NAMES]}))
    dataset = CIFAR10(root)
    assert_holds(dataset, [0, 1, 2, 3, 4])
    assert dataset.classes == NAMES


def test_items_are_transformed(root: Path) -> None:
    image, target = CIFAR10(root)[4]
    assert np.array_equal(np.asarray(image), pixels(1)[1].reshape(3, 32, 32).transpose(1, 2, 0))
    assert target == 2
    to_tensor = flowvision.transforms.ToTensor()
    dataset = CIFAR10(root, transform=to_tensor, target_transform=lambda target: target + 100)
    x, y = dataset[4]
    assert torch.equal(x, to_tensor(np.array(image)))
    assert y == 102


def test_a_loader_takes_them(root: Path) -> None:
    dataset = CIFAR10(root, train=False, transform=flowvision.transforms.ToTensor())
    x, y = next(iter(DataLoader(dataset, batch_size=4)))
    assert x.shape == (4, 3, 32, 32)
    assert y.tolist() == labels(5)[:4]


def test_the_archive_is_read_or_unpacked(tmp_path: Path) -> None:
    write_archive(tmp_path / "cifar-10-python.tar.gz", contents())
    assert_holds(CIFAR10(tmp_path), [0, 1, 2, 3, 4])
    assert not (tmp_path / "cifar-10-batches-py").exists()
    assert_holds(CIFAR10(tmp_path, download=True), [0, 1, 2, 3, 4])
    (tmp_path / "cifar-10-python.tar.gz").unlink()
    unpacked = {path.name: path.read_bytes() for path in (tmp_path / "cifar-10-batches-py").iterdir()}
    assert unpacked == contents()
    assert_holds(CIFAR10(tmp_path, train=False), [5])


def test_a_folder_that_is_not_complete_is_completed(root: Path) -> None:
    (root / "cifar-10-batches-py" / "data_batch_3").unlink()
    write_archive(root / "cifar-10-python.tar.gz", contents())
    assert_holds(CIFAR10(root, download=True), [0, 1, 2, 3, 4])
    assert (root / "cifar-10-batches-py" / "data_batch_3").exists()


def test_an_archive_writes_to_its_folder_only(tmp_path: Path) -> None:
    root = tmp_path / "data"
    root.mkdir()
    archive = root / "cifar-10-python.tar.gz"
    write_archive(archive, contents(), folder="../cifar-10-batches-py")
    with pytest.raises(mg.DatasetError, match="it holds no data_batch_1"):
        CIFAR10(root, download=True)
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(mg.DatasetError, match="it holds no test_batch"):
        CIFAR10(root, train=False, download=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["data", archive.name]


@pytest.mark.parametrize("download", [False, True])
def test_missing_files_are_named(root: Path, download: bool) -> None:
    (root / "cifar-10-batches-py" / "data_batch_3").unlink()
    (root / "cifar-10-batches-py" / "data_batch_5").unlink()
    with pytest.raises(mg.DatasetError) as raised:
        CIFAR10(root, download=download)
    folder = root / "cifar-10-batches-py"
    assert raised.value.message == (
        f'CIFAR-10 is not in "{root}": no data_batch_3, data_batch_5 in "{folder}", '
        f'and no "cifar-10-python.tar.gz"'
    )
    assert raised.value.hint == (
        "nothing is ever downloaded: get cifar-10-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html "
        f'("python version") and put it into "{root}"'
    )
    assert raised.value.where.file == __file__


def test_names_of_classes_are_known_without_a_file(root: Path) -> None:
    (root / "cifar-10-batches-py" / "batches.meta").unlink()
    dataset = CIFAR10(root)
    assert_holds(dataset, [0, 1, 2, 3, 4])
    assert dataset.classes == NAMES


def test_a_source_is_named_where_one_is_given(tmp_path: Path) -> None:
    with pytest.raises(mg.DatasetError, match=r"from https://example\.org/cifar/"):
        CIFAR10(tmp_path / "nowhere", download=True, source_url="https://example.org/cifar/")


def batch(data: Any = None, labels: Any = None) -> bytes:
    return pickle.dumps({"data": pixels(5) if data is None else data, "labels": labels})


DAMAGED = {
    "truncated": (lambda: contents()["test_batch"][:-300], "cannot read"),
    "empty": (lambda: b"", "EOFError"),
    "no pickle": (lambda: b"<html>not found</html>", "cannot read"),
    "a list": (lambda: pickle.dumps([1]), "holds a list, not a dict"),
    "other keys": (lambda: pickle.dumps({"x": 1}), "no rows of 3072 bytes"),
    "small rows": (lambda: batch(pixels(5)[:, :100], labels(5)), "no rows of 3072 bytes"),
    "floats": (lambda: batch(pixels(5).astype("f4"), labels(5)), "no rows of 3072 bytes"),
    "objects": (lambda: batch(np.array([None]), labels(5)), "asks for arrays of 'O8'"),
    "few labels": (lambda: batch(labels=[1]), "8 images and 1 labels"),
    "no labels": (lambda: batch(), "labels are no list of numbers"),
    "words": (lambda: batch(labels=["cat"] * 8), "labels are no list of numbers"),
    "eleventh class": (lambda: batch(labels=[10] * 8), "not from 0 to 9"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named(root: Path, name: str) -> None:
    make, told = DAMAGED[name]
    path = root / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(make())
    with pytest.raises(mg.DatasetError, match=told) as raised:
        CIFAR10(root, train=False)
    assert f'"{path}"' in str(raised.value)
    assert len(CIFAR10(root)) == 25  # the other half is whole


def test_every_truncation_is_an_error(root: Path) -> None:
    path = root / "cifar-10-batches-py" / "batches.meta"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(mg.DatasetError, match=r"batches\.meta"):
            CIFAR10(root, train=False)


@pytest.mark.parametrize("spoil", [lambda raw: raw[:-900], lambda raw: raw[:40], lambda raw: b"no archive"])
def test_a_damaged_archive_is_named(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    write_archive(path, contents())
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(mg.DatasetError, match=r"cifar-10-python\.tar\.gz"):
        CIFAR10(tmp_path, download=True)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_code_in_a_file_is_refused_and_not_run(root: Path, tmp_path: Path, protocol: int) -> None:
    trace = tmp_path / "was run"
    path = root / "cifar-10-batches-py" / "batches.meta"
    for call in (Calls(Path.touch, trace), Calls(eval, "1"), Calls(np.load, "x"), Calls(getattr, 1, "real")):
        path.write_bytes(pickle.dumps({"label_names": NAMES, "more": [call]}, protocol))
        with pytest.raises(mg.DatasetError, match=r"it asks for \w+.*, and nothing of it was run"):
            CIFAR10(root)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["numpy ndarray", "numpy dtype", "_codecs encode"])
def test_a_file_changes_nothing_of_what_reads_it(name: str) -> None:
    """The opcode BUILD sets attributes: on what a file may name there are none to set."""
    named = b"c" + name.replace(" ", "\n").encode() + b"\n"
    for state in (b"}VvalueN" + b"s", b"N}VvalueN" + b"s\x86"):
        with pytest.raises(AttributeError):
            read_pickle(named + state.replace(b"value", b"value\n") + b"b.")


@pytest.mark.every_case
@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i8", "f8", "?"])
def test_arrays_of_all_protocols_are_read(protocol: int, dtype: str) -> None:
    for array in (np.arange(6).reshape(2, 3).astype(dtype), np.asfortranarray(np.ones((2, 3), dtype))):
        got = read_pickle(pickle.dumps(array, protocol))
        assert isinstance(got, Array)
        assert got.value.dtype == array.dtype
        assert np.array_equal(got.value, array)


def test_an_array_that_claims_more_than_it_has_is_refused() -> None:
    whole = pickle.dumps(np.zeros((2, 3), "u1"), 4)
    for old, new in ((b"K\x02K\x03", b"K\x02K\x04"), (b"K\x02K\x03", b"K\x00K\x03")):
        spoiled = whole.replace(old, new)
        assert spoiled != whole
        pickletools.dis(spoiled, out=io.StringIO())
        with pytest.raises(pickle.UnpicklingError, match="6 bytes for an array"):
            read_pickle(spoiled)


def test_cifar100_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        entries = {"data": pixels(2), "fine_labels": [99] * 5, "coarse_labels": [19] * 5}
        (folder / name).write_bytes(pickle.dumps(entries, 2))
    classes = {"fine_label_names": [f"class {i}" for i in range(100)], "coarse_label_names": []}
    (folder / "meta").write_bytes(pickle.dumps(classes, 2))
    dataset = flowvision.datasets.CIFAR100(tmp_path, train=False)
    assert len(dataset) == 5
    assert dataset.classes[dataset[0][1]] == "class 99"
    with pytest.raises(mg.DatasetError, match="CIFAR-100 is not in"):
        flowvision.datasets.CIFAR100(tmp_path / "elsewhere")
