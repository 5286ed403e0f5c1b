"""Packages of native code: what the inductor backend computes, in Python and in C++, with the state inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from monograph.compat.inductor import loading as _inductor
from tests.support import ROOT

BEFORE, STEPS = 2, 5
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class Infer(mg.Graph):
    def __init__(self, model):
        super().__init__()
        self.net = model

    def build(self, x, scale=1.0):
        y = self.net(x) * scale
        return {"scores": y, "transposed": y.t(), "again": x, "weight": self.net[0].weight, "about": "net"}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator))
        for _ in range(count)
    ]


class Plain:
    """The same training in plain PyTorch."""

    def __init__(self, optimizer):
        self.model = network()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def training_graph(optimizer):
    model = network()
    return mg.train_graph(model, nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](model.parameters()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module")
def infer(folder):
    """A package that infers, and the graph on the inductor backend."""
    graph = Infer(network().eval())
    graph.config.backend("inductor")
    with torch.no_grad():
        graph.compile(mg.spec((4, 8)), 2.0)
        return mg.export_aoti(graph, folder / "infer.pt2"), graph


@pytest.fixture(scope="module")
def sgd(folder):
    """A package of a graph that has made no step."""
    graph = training_graph("sgd")
    graph.compile(*batches(1)[0])
    return mg.export_aoti(graph, folder / "sgd.pt2")


@pytest.fixture(scope="module")
def adam(folder):
    """A package of a graph that has made some steps, on the backend that compiles nothing."""
    graph = training_graph("adam")
    for batch in batches(BEFORE):
        graph(*batch)
    return mg.export_aoti(graph, folder / "adam.pt2")


@pytest.mark.long
def test_inference_is_that_of_the_backend(infer):
    path, graph = infer
    package, x = mg.load(path, trust=True), torch.randn(4, 8)
    with torch.no_grad():
        got, expected = package(x, 2.0), graph(x, 2.0)
        plain = network().eval()(x) * 2.0
    assert list(got) == list(expected)
    assert got["about"] == "net"
    for name in ("scores", "transposed", "again", "weight"):
        assert torch.equal(got[name], expected[name])
        assert got[name].stride() == expected[name].stride()
    torch.testing.assert_close(got["scores"], plain, rtol=1e-5, atol=1e-6)
    assert got["again"].data_ptr() != x.data_ptr()
    kept = got["scores"].clone()
    package(x, scale=3.0)
    assert torch.equal(got["scores"], kept)
    assert "(x: float32[4, 8], scale: float) -> {scores: float32[4, 3]" in str(package)


# the compiled step sums in another order: a few roundings of float32 in each step
@pytest.mark.long
@pytest.mark.parametrize(("name", "before"), [("sgd", 0), ("adam", BEFORE)])
def test_training_follows_eager(name, before, request):
    package, plain = mg.load(request.getfixturevalue(name), trust=True), Plain(name)
    for index, batch in enumerate(batches(before + STEPS)):
        loss = plain.step(*batch)
        if index >= before:
            torch.testing.assert_close(package(*batch), loss, rtol=1e-5, atol=1e-6)
    state = package.state()
    for key, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(state[f"model.{key}"], tensor, rtol=1e-4, atol=1e-6)
    entries = plain.optimizer.state[plain.model[3].weight]
    for key, tensor in entries.items():
        torch.testing.assert_close(state[f"optimizer.0/model.3.weight/{key}"], tensor, rtol=1e-4, atol=1e-6)


def test_state_is_read_and_set(sgd):
    package, (batch,) = mg.load(sgd, trust=True), batches(1)
    before = package.state()
    package.load_state({"optimizer.0/group0/lr": 0.0})
    package(*batch)
    after = package.state()
    assert after["model.1.num_batches_tracked"] == 1
    for name in ("model.0.weight", "model.3.bias"):
        assert torch.equal(before[name], after[name])
    package.load_state(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in package.state().items())
    other = mg.load(sgd, trust=True)
    package(*batch)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state().items())
    with pytest.raises(mg.SignatureError, match="has no state 'lr'"):
        package.load_state({"lr": 0.1})
    with pytest.raises(mg.SignatureError, match="the package has"):
        package.load_state({"model.0.weight": torch.zeros(8, 16)})


@pytest.mark.long
def test_wrong_arguments(infer):
    package = mg.load(infer[0], trust=True)
    x = torch.zeros(4, 8)
    for args, kwargs, message in (
        ((torch.zeros(5, 8), 1.0), {}, r"argument x is float32\[5, 8\]"),
        ((x.double(), 1.0), {}, r"argument x is float64"),
        ((x, "2"), {}, "takes a number"),
        ((x,), {}, "argument scale is missing"),
        ((x, 1.0, 2.0), {}, "3 positional arguments"),
        ((x,), {"scales": 1.0}, "argument scales is unknown"),
        ((None, 1.0), {}, "takes a tensor"),
    ):
        with pytest.raises(mg.SignatureError, match=message):
            package(*args, **kwargs)
    assert torch.equal(package(torch.zeros(8, 4).t(), 1.0)["scores"], package(x, 1.0)["scores"])


@pytest.mark.long
def test_what_is_not_loaded(infer, tmp_path, monkeypatch):
    path, _ = infer
    with monkeypatch.context() as patch:
        patch.setattr(_inductor, "NativeState", None)
        patch.setattr("tempfile.TemporaryDirectory", None)  # nothing is written out
        with pytest.raises(mg.ArtifactError, match="it is native code") as caught:
            mg.load(path)
    assert "trust=True" in caught.value.hint
    renamed = shutil.copy(path, tmp_path / "package")
    with pytest.raises(mg.ArtifactError, match="it is native code"):
        mg.load(renamed)
    with pytest.raises(mg.ArtifactError, match="compiled already"):
        mg.load(path, backend="aten", trust=True)
    raw, spoilt = path.read_bytes(), tmp_path / "spoilt.pt2"
    at = raw.index(b"\x7fELF") + 5000
    for damaged in (b"", b"x" * 100, raw[:-50], raw[: len(raw) // 2], raw[:at] + b"spoilt" + raw[at + 6 :]):
        spoilt.write_bytes(damaged)
        with pytest.raises(mg.ArtifactError, match="cannot load"):
            mg.load(spoilt, trust=True)
    with zipfile.ZipFile(spoilt, "w") as archive:
        archive.writestr("model/data/aotinductor/model/x.so", b"\x7fELF")
    with pytest.raises(mg.ArtifactError, match=r"it has no monograph\.json"):
        mg.load(spoilt, trust=True)
    with pytest.raises(mg.CheckpointError, match="No such file"):
        mg.load(tmp_path / "nothing.pt2", trust=True)


@pytest.mark.long
def test_a_process_without_the_model(infer, tmp_path):
    path, graph = infer
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "monograph").symlink_to(ROOT / "monograph")
    x = torch.randn(4, 8)
    torch.save(x, tmp_path / "x")
    code = (
        "import sys, torch, monograph as mg\n"
        "package = mg.load(sys.argv[1], trust=True)\n"
        "torch.save(package(torch.load('x'), 2.0), 'out')\n"
        "assert 'torch._inductor' not in sys.modules and 'tests' not in sys.modules\n"
    )
    paths = os.pathsep.join([str(tmp_path / "packages"), sysconfig.get_path("purelib")])
    command = [sys.executable, "-S", "-c", code, str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "out")["scores"], graph(x, 2.0)["scores"])


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of the C++ examples, built against the installed torch."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    built = tmp_path_factory.mktemp("cpp")
    source = ["-S", str(ROOT / "examples" / "cpp"), "-B", str(built)]
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", *source, prefix], ["cmake", "--build", str(built)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return built


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_cpp_trains(programs, sgd, tmp_path):
    (batch,) = batches(1)
    torch.save(list(batch), tmp_path / "inputs.pt")
    told = run(programs / "train", sgd, tmp_path / "inputs.pt", "model.3.weight").splitlines()
    plain = Plain("sgd")
    losses = [plain.step(*batch).item() for _ in range(5)]
    plain.optimizer.param_groups[0]["lr"] /= 10
    losses += [plain.step(*batch).item() for _ in range(5)]
    assert [line.split()[0] for line in told[:10]] == ["loss"] * 10
    assert [float(line.split()[1]) for line in told[:10]] == pytest.approx(losses, abs=1e-5)
    assert told[10].startswith("model.3.weight sum ")
    assert float(told[10].split()[-1]) == pytest.approx(plain.model[3].weight.sum().item(), abs=1e-4)


@pytest.mark.long
def test_cpp_infers(programs, infer, tmp_path):
    x = torch.randn(4, 8)
    torch.save([x, torch.tensor(2.0, dtype=torch.float64)], tmp_path / "inputs.pt")
    told = run(programs / "infer", infer[0], tmp_path / "inputs.pt").splitlines()
    with torch.no_grad():
        expected = network().eval()(x) * 2.0
    got = [list(map(float, line.split())) for line in told[:4]]
    torch.testing.assert_close(torch.tensor(got), expected, rtol=0, atol=1e-3)  # what is printed is short


@pytest.mark.long
def test_cpp_notices_other_shapes_if_asked(programs, infer, tmp_path):
    torch.save([torch.zeros(5, 8), torch.tensor(2.0, dtype=torch.float64)], tmp_path / "inputs.pt")
    command = [str(programs / "infer"), str(infer[0]), str(tmp_path / "inputs.pt")]
    env = {**os.environ, "AOTI_RUNTIME_CHECK_INPUTS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode != 0
    assert "unmatched dim value at 0, expected: 4" in done.stderr


class Scaled(mg.Graph):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def build(self, x):
        return self.op(x)


@pytest.mark.long
@pytest.mark.parametrize("micro_steps", [1, 4])
def test_a_build_for_any_size_is_exported_for_that_of_its_capture(micro_steps, tmp_path):
    model = network()
    step = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.set_gradient_accumulation_steps(micro_steps)
    for rows in (16, 24, 8):
        step(torch.randn(rows, 8), torch.randint(3, (rows,)))
    assert len(step.builds) == 2
    package = mg.load(mg.export_aoti(step, tmp_path / "step.pt2"), trust=True)
    x, y = torch.randn(24, 8), torch.randint(3, (24,))
    torch.testing.assert_close(step(x, y), package(x, y))
    with pytest.raises(mg.SignatureError, match=r"argument batch\[0\] is float32\[8, 8\]"):
        package(x[:8], y[:8])


def test_what_is_not_exported(tmp_path, monkeypatch):
    path = tmp_path / "a.pt2"
    model = network()
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.1)
    train = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer)
    with pytest.raises(mg.ArtifactError, match="has no program yet"):
        mg.export_aoti(train, path)
    train(*batches(1)[0])
    with pytest.raises(mg.ArtifactError, match="a later one may need another program"):
        mg.export_aoti(train, path)
    with pytest.raises(mg.ArtifactError, match=r"ends in \.pt2"):
        mg.export_aoti(train, tmp_path / "a.zip")
    model[0].weight.requires_grad_(False)
    with pytest.raises(mg.ArtifactError, match="was changed since"):
        mg.export_aoti(train, path)
    with pytest.raises(mg.ArtifactError, match="got a Linear"):
        mg.export_aoti(nn.Linear(2, 2), path)
    double = mg.trace(lambda x: x * 2)
    double(torch.ones(2))
    with monkeypatch.context() as patch:
        patch.setattr(_inductor, "_compiled", no_compiler)
        patch.setattr(_inductor, "compiler_missing", lambda: "InvalidCxxCompiler: none found")
        with pytest.raises(mg.ArtifactError, match=r"no C\+\+ code can be compiled here") as caught:
            mg.export_aoti(double, path)
    assert "install g++" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def no_compiler(*_args):
    raise RuntimeError("no compiler")


def test_an_op_of_python_is_refused(tmp_path):
    @torch.library.custom_op("monograph_tests::tripled", mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    tripled.register_fake(torch.empty_like)
    graph = Scaled(tripled)
    graph(torch.ones(2))
    with pytest.raises(
        mg.ArtifactError, match=r"monograph_tests\.tripled.* is implemented in Python"
    ) as caught:
        mg.export_aoti(graph, tmp_path / "a.pt2")
    assert caught.value.where.file == __file__
    assert list(tmp_path.iterdir()) == []


class Branch(mg.Graph):
    """The value of an argument decides what the step computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.config.backend("aten")

    def build(self, x: torch.Tensor, flag: torch.Tensor | float) -> torch.Tensor:
        values = self.linear(x)
        is_set = flag.any() if isinstance(flag, torch.Tensor) else flag > 0
        return values * 100 if is_set else values * flag


@pytest.mark.every_case
@pytest.mark.parametrize("export", [mg.export_aoti, mg.export_onnx])
@pytest.mark.parametrize("flag", [torch.tensor([True, False]), 0.5])
def test_a_branch_that_an_argument_decides_is_refused(export: Any, flag: Any, tmp_path: Path) -> None:
    graph, place = Branch(), tmp_path / "step.pt2"
    with torch.no_grad():
        graph(torch.ones(2, 4), flag)
        with pytest.raises(mg.ArtifactError, match=r"others may need another program|takes a float"):
            export(graph, place)
    assert not place.exists()
