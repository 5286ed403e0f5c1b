"""The image sets of the examples: the exact file format of CIFAR-10, refused pickles, the digits."""

from __future__ import annotations

import pickle
import runpy
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import ROOT

IMAGES = runpy.run_path(str(ROOT / "examples" / "data" / "images.py"))
FILES = (*IMAGES["CIFAR10_TRAIN_FILES"], IMAGES["CIFAR10_TEST_FILE"])


def string(text: bytes) -> bytes:
    """A string as Python 2 pickled it; Python 3 cannot write these opcodes."""
    short = pickle.SHORT_BINSTRING + struct.pack("<B", len(text)) if len(text) < 256 else b""
    return (short or pickle.BINSTRING + struct.pack("<i", len(text))) + text


def plain(value: Any) -> bytes:
    """A tuple or list of small integers, without the frame of a pickle."""
    return pickle.dumps(value, protocol=2).removeprefix(b"\x80\x02").removesuffix(b".")


def cifar10_file(data: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """A batch file, opcode by opcode as in the published archive, without its memo entries."""
    dtype = b"cnumpy\ndtype\n" + b"(" + string(b"u1") + b"K\x00K\x01t" + b"R"
    dtype += b"(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"(cnumpy\nndarray\n" + plain((0,)) + string(b"b") + b"tR"
    )
    array += b"(K\x01" + plain(data.shape) + dtype + b"\x89" + string(data.tobytes()) + b"tb"
    entries = string(b"batch_label") + string(b"training batch 1 of 5")
    entries += string(b"labels") + plain(labels)
    entries += string(b"data") + array
    entries += (
        string(b"filenames") + b"](" + b"".join(string(b"%d.png" % i) for i in range(len(labels))) + b"e"
    )
    return b"\x80\x02}(" + entries + b"u."


def write_cifar10(folder: Path, *, per_file: int) -> np.ndarray[Any, Any]:
    """Six batch files; returns all their pixels in order."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (len(FILES), per_file, 3072), dtype=np.uint8)
    for name, data in zip(FILES, pixels, strict=True):
        (folder / name).write_bytes(cifar10_file(data, [i % 10 for i in range(per_file)]))
    return pixels


@pytest.mark.filterwarnings("error")
def test_cifar10_is_read(tmp_path: Path) -> None:
    pixels = write_cifar10(tmp_path / "cifar-10-batches-py", per_file=4)
    images = IMAGES["load_cifar10"](tmp_path)
    assert images.train_x.shape == (20, 3, 32, 32)
    assert images.test_x.shape == (4, 3, 32, 32)
    assert images.train_x.dtype == torch.float32
    assert images.train_y.tolist() == [0, 1, 2, 3] * 5
    assert images.test_y.tolist() == [0, 1, 2, 3]
    # a row holds all red values, then green, then blue, each row by row
    red, green = pixels[5, 1, 33], pixels[5, 1, 1024 + 33]
    torch.testing.assert_close(
        images.test_x[1, 0, 1, 1].item(), (red / 255 - 0.4914) / 0.2470, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        images.test_x[1, 1, 1, 1].item(), (green / 255 - 0.4822) / 0.2435, rtol=1e-5, atol=1e-5
    )


def test_the_folder_itself_may_be_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar", per_file=2)
    assert len(IMAGES["load_cifar10"](tmp_path / "cifar").train_x) == 10


def test_a_file_written_by_numpy_of_today_is_read(tmp_path: Path) -> None:
    data = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    (tmp_path / "batch").write_bytes(pickle.dumps({b"data": data, b"labels": [3, 7]}, protocol=4))
    x, y = IMAGES["read_cifar10_batch"](tmp_path / "batch")
    assert np.array_equal(x.reshape(2, 3072).numpy(), data)
    assert y.tolist() == [3, 7]


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "code_ran"
    for harmful in (Malicious(trace), {b"data": Malicious(trace), b"labels": []}, eval, np.load):
        (tmp_path / "batch").write_bytes(pickle.dumps(harmful))
        with pytest.raises(pickle.UnpicklingError, match="refused"):
            IMAGES["read_cifar10_batch"](tmp_path / "batch")
    assert not trace.exists()


def test_an_array_of_objects_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(pickle.dumps({b"data": np.array([{}]), b"labels": [0]}, protocol=4))
    with pytest.raises(pickle.UnpicklingError, match="u1"):
        IMAGES["read_cifar10_batch"](tmp_path / "batch")


def test_another_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(cifar10_file(np.zeros((2, 10), dtype=np.uint8), [0, 1]))
    with pytest.raises(ValueError, match=r"not a CIFAR-10 batch: data uint8 \(2, 10\)"):
        IMAGES["read_cifar10_batch"](tmp_path / "batch")


def test_digits_are_split_the_same_way_each_time() -> None:
    pytest.importorskip("sklearn")
    first, second = IMAGES["load_digits"](), IMAGES["load_digits"]()
    assert first.train_x.shape == (1437, 3, 32, 32)
    assert first.test_x.shape == (360, 3, 32, 32)
    assert torch.equal(first.test_x, second.test_x)
    assert set(first.test_y.tolist()) == set(range(10))
    assert abs(first.train_x.mean().item()) < 0.01
