"""Twenty files made to run code, to read or write elsewhere, or to take all memory: refused, and nothing happened.

Each is an artifact whose digests are right, as its author would make them. What would show that code ran is a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import monograph as mg
from tests.stress.mutate_artifact import seal

CODE = "__import__('pathlib').Path({!r}).touch()"


class Infer(mg.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, x):
        return self.model(x).relu()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "artifact"
    graph = Infer(nn.Linear(4, 3))
    graph(torch.ones(2, 4))
    return mg.save(graph, path)


@pytest.fixture
def artifact(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "artifact"))


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "code ran"


class Payload:
    """Touches the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (exec, (CODE.format(str(self.marker)),))


def edited(artifact: Path, change) -> None:
    """Change the program, and make all digests right again."""
    (file,) = artifact.glob("program-*.json")
    program = json.loads(file.read_text())
    change(program)
    file.write_text(json.dumps(program))
    raw, values = file.read_bytes(), json.loads((artifact / "manifest.json").read_text())
    values["documents"][0] |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    seal(artifact, values)


def described(artifact: Path, change) -> None:
    """Change the manifest, and make its digest right again."""
    values = json.loads((artifact / "manifest.json").read_text())
    change(values)
    seal(artifact, values)


def relu(program):
    return next(node for node in program["nodes"] if node[1] == "aten::relu.default")


def op(name, args, kwargs=None):
    """A change that calls another op in place of the last one."""

    def change(artifact, marker):
        given = json.loads(json.dumps(args).replace("MARKER", str(marker)))
        edited(artifact, lambda program: relu(program).__setitem__(slice(1, 4), [name, given, kwargs or {}]))

    return change


def named(text):
    """A change that gives a node a name that is code."""

    def change(artifact, marker):
        code = text.replace("CODE", CODE.format(str(marker)))

        def rename(program):
            (before,) = relu(program)[:1]
            relu(program)[0] = code
            program["results"] = json.loads(
                json.dumps(program["results"]).replace(json.dumps(before), json.dumps(code))
            )

        edited(artifact, rename)

    return change


def pickled_manifest(artifact, marker):
    (artifact / "manifest.json").write_bytes(pickle.dumps(Payload(marker)))


def pickled_program(artifact, marker):
    (file,) = artifact.glob("program-*.json")
    file.write_bytes(pickle.dumps(Payload(marker)))
    described(artifact, lambda values: values["documents"][0].update(about(file)))


def about(file):
    raw = file.read_bytes()
    return {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}


def pickled_tensors(artifact, marker):
    (file,) = artifact.glob("*.safetensors")
    file.write_bytes(pickle.dumps(Payload(marker)))
    described(artifact, lambda values: values["files"][0].update(about(file)))


def torch_archive(artifact, marker):
    (file,) = artifact.glob("*.safetensors")
    torch.save(Payload(marker), file)
    described(artifact, lambda values: values["files"][0].update(about(file)))


def additional_pickle(artifact, marker):
    (artifact / "data.pkl").write_bytes(pickle.dumps(Payload(marker)))


def size_expression(artifact, marker):
    code = CODE.format(str(marker))
    edited(artifact, lambda program: program["nodes"][0][2].append({"$size": code}))


def sympy_expression(artifact, marker):
    code = CODE.format(str(marker))
    edited(artifact, lambda program: program["nodes"][0][2].append({"expr_str": code}))


def branch_code(artifact, marker):
    code = CODE.format(str(marker))
    edited(artifact, lambda program: program["conditions"]["checks"].append(["x", [code, 1]]))


def branch_about(artifact, marker):
    code = CODE.format(str(marker))
    edited(artifact, lambda program: program["conditions"]["checks"].append([code, ["eval", code]]))


def function_name(artifact, marker):
    code = CODE.format(str(marker))
    edited(artifact, lambda program: program.update(name=f"f(): {code}\ndef g"))


def field_name(artifact, marker):
    code = CODE.format(str(marker))

    def change(values):
        (program,) = values["signatures"]["infer"]["programs"]
        program["results"] = {"namedtuple": ["X", [code], [program["results"]]]}

    described(artifact, change)


def scheduler(artifact, marker):
    code = CODE.format(str(marker))

    def change(values):
        values["signatures"]["infer"]["schedulers"] = {"scheduler.0": ["optimizer.0", ["LambdaLR", [code]]]}

    described(artifact, change)


def way_out(artifact, marker):
    described(artifact, lambda values: values["documents"][0].update(name="../../../etc/passwd"))


def link(artifact, marker):
    (file,) = artifact.glob("program-*.json")
    shutil.move(file, marker.parent / "elsewhere.json")
    file.symlink_to(marker.parent / "elsewhere.json")


def op_that_is_registered(artifact, marker):
    library = torch.library.Library("tests_malicious", "FRAGMENT")
    name = f"touch{len(LIBRARIES)}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: (marker.touch(), x.clone())[1], "CompositeExplicitAutograd")
    LIBRARIES.append(library)
    edited(artifact, lambda program: relu(program).__setitem__(1, f"tests_malicious::{name}.default"))


LIBRARIES: list[torch.library.Library] = []  # an op lives as long as its library

MALICIOUS = {
    "pickle as manifest": pickled_manifest,
    "pickle as program": pickled_program,
    "pickle as tensors": pickled_tensors,
    "torch archive as tensors": torch_archive,
    "a pickle besides": additional_pickle,
    "code as a size": size_expression,
    "code as a symbolic expression": sympy_expression,
    "code as a branch": branch_code,
    "eval in a branch": branch_about,
    "code as the name of a program": function_name,
    "code as the name of a value": named("x; CODE; y"),
    "a line as the name of a value": named("x\nCODE\ny"),
    "code as a field": field_name,
    "a scheduler with a function": scheduler,
    "exec": op("python::exec", [{"str": CODE}]),
    "eval of builtins": op("builtins::eval.default", [{"str": "1"}]),
    "an attribute of torch": op("torch::load.default", [{"str": "MARKER"}]),
    "a file as an op": op("aten::from_file.default", [{"str": "MARKER"}, True, 8]),
    "printing": op("aten::_print.default", [{"str": "MARKER"}]),
    "an op that changes its input": op("aten::relu_.default", ["addmm"]),
    "an op of another library": op_that_is_registered,
    "a way out": way_out,
    "a link": link,
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", MALICIOUS)
def test_refused_and_nothing_ran(artifact, marker, name):
    assert len(MALICIOUS) >= 20
    mg.load(artifact)(torch.ones(2, 4))  # which imports what it needs
    MALICIOUS[name](artifact, marker)
    before = set(sys.modules)
    with pytest.raises(mg.ArtifactError):
        mg.load(artifact)(torch.ones(2, 4))
    assert not marker.exists()
    assert {
        module for module in set(sys.modules) - before if not module.startswith(("torch", "sympy", "mpmath"))
    } <= set()


def test_the_edits_are_what_is_refused(artifact):
    """The same edits that change nothing harmful load: else all of the above might fail for another reason."""
    edited(artifact, lambda program: relu(program).__setitem__(1, "aten::sigmoid.default"))
    described(artifact, lambda values: None)
    assert torch.equal(mg.load(artifact)(torch.ones(2, 4)) > 0, torch.ones(2, 3, dtype=torch.bool))


def test_a_library_that_is_trusted(artifact, marker):
    op_that_is_registered(artifact, marker)
    mg.load(artifact, trust=True)(torch.ones(2, 4))
    assert marker.exists()


LIES = {
    "a huge result": lambda node: node.__setitem__(5, ["float32", [2**40, 3], [3, 1]]),
    "another result": lambda node: node.__setitem__(5, ["float32", [3, 2], [2, 1]]),
    "a huge tensor": lambda node: node.__setitem__(
        slice(1, 6), ["aten::zeros.default", [[2**30, 2**10]], {}, 0, ["float32", [2, 3], [3, 1]]]
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_about_shapes(artifact, name):
    edited(artifact, lambda program: LIES[name](relu(program)))
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, limit[1]))
    try:
        with pytest.raises(mg.ArtifactError):
            mg.load(artifact)(torch.ones(2, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("device", "refused"),
    [
        ("meta", "model.weight is .*cpu.*, and a program takes .*meta"),
        pytest.param(
            "cuda:0",
            "runs on cuda:0, which is not here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is here"),
        ),
    ],
)
def test_state_on_a_device_that_is_none(artifact, device, refused):
    edited(artifact, lambda program: program["given"][0].append(device))
    with pytest.raises(mg.ArtifactError, match=refused):
        mg.load(artifact)


def test_lies_about_arguments(artifact):
    def change(values):
        values["signatures"]["infer"]["programs"][0]["arguments"]["positional"][0][1]["shape"] = [2, 5]

    described(artifact, change)
    with pytest.raises(mg.ArtifactError, match=r"x is f32\[2, 5\], and a program takes f32\[2, 4\]"):
        mg.load(artifact)


# --- one file ----------------------------------------------------------------------------------------------------


def packed(artifact, path, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for file in sorted(artifact.iterdir()):
            archive.write(file, file.name)
    return path


def test_an_archive_of_another_tool(artifact, tmp_path):
    assert mg.load(packed(artifact, tmp_path / "a.zip"))(torch.ones(2, 4)).shape == (2, 3)


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", ["../out.json", "/etc/passwd", "sub/manifest.json", "manifest.json\0", "x"])
def test_members_with_other_names(artifact, tmp_path, name):
    path = packed(artifact, tmp_path / "a.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")
    with pytest.raises(mg.ArtifactError, match="no part of it"):
        mg.load(path)
    assert not (tmp_path / "out.json").exists()


def test_compressed_bombs(artifact, tmp_path):
    with pytest.raises(mg.ArtifactError, match="compressed"):
        mg.load(packed(artifact, tmp_path / "a.zip", compression=zipfile.ZIP_DEFLATED))
    bomb = tmp_path / "bomb.zip"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", bytes(100 << 20))
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(mg.ArtifactError, match="compressed"):
        mg.load(bomb)


def test_overlapping_members(artifact, tmp_path):
    """Many names for the same bytes: a bomb that needs no compression."""
    path = packed(artifact, tmp_path / "a.zip")
    raw = bytearray(path.read_bytes())
    first = raw.index(b"PK\1\2")
    second = raw.index(b"PK\1\2", first + 4)
    raw[second + 42 : second + 46] = raw[first + 42 : first + 46]  # where the member begins
    path.write_bytes(raw)
    with pytest.raises(mg.ArtifactError):
        mg.load(path)


def test_a_member_that_reaches_into_the_next(artifact, tmp_path):
    path = packed(artifact, tmp_path / "a.zip")
    raw = bytearray(path.read_bytes())
    first = raw.index(b"PK\1\2")
    (size,) = struct.unpack("<L", raw[first + 24 : first + 28])
    raw[first + 20 : first + 28] = struct.pack("<2L", size + 200, size + 200)  # stored, and itself
    path.write_bytes(raw)
    with pytest.raises(mg.ArtifactError, match="entries overlap"):
        mg.load(path)


def test_a_list_of_members_that_is_too_long(tmp_path):
    path = tmp_path / "a.zip"
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, 0xFFFFFF00, 0, 0)
    path.write_bytes(b"PK\3\4" + bytes(100) + end)
    with pytest.raises(mg.ArtifactError, match="too long"):
        mg.load(path)


def test_an_empty_file_and_a_pipe(tmp_path):
    (tmp_path / "a.zip").touch()
    with pytest.raises(mg.ArtifactError):
        mg.load(tmp_path / "a.zip")
    os.mkfifo(tmp_path / "pipe.zip")
    with pytest.raises(mg.MonographError):
        mg.load(tmp_path / "pipe.zip")


def test_a_checkpoint_of_torch(tmp_path, marker):
    torch.save(Payload(marker), tmp_path / "model.pt")
    with pytest.raises(mg.ArtifactError):
        mg.load(tmp_path / "model.pt")
    assert not marker.exists()
