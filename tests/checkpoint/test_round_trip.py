"""What is saved comes back: every dtype, layout and type, tied tensors as one, all of torch's state dicts."""

from __future__ import annotations

import math
import os
import struct
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import monograph as mg
from monograph.checkpoint import write as writing
from monograph.checkpoint.bytes import CODES
from tests.checkpoint.same import assert_equal, raw_bytes


def through_disk(state, tmp_path, name="checkpoint"):
    return mg.load(mg.save(state, tmp_path / name, overwrite=True))


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any bits; of no more than 0 and 1 for bool."""
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


# --- tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_dtype(dtype, tmp_path):
    torch.manual_seed(0)
    state = {
        "flat": bits(dtype, 7),
        "scalar": bits(dtype),
        "matrix": bits(dtype, 3, 5),
        "transposed": bits(dtype, 3, 5).t(),
        "slice": bits(dtype, 6, 6)[1:5:2, ::3],
        "expanded": bits(dtype, 1, 4).expand(3, 4),
        "empty": bits(dtype, 0, 3),
        "empty but large": bits(dtype, 0, 2**55),
    }
    loaded = through_disk(state, tmp_path)
    assert_equal(state, loaded)
    for name, tensor in state.items():
        assert raw_bytes(tensor) == raw_bytes(loaded[name])


def test_every_dtype_of_torch_is_stored_or_refused(tmp_path):
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - set(CODES):
        try:
            tensor = torch.empty(4, dtype=torch.uint8).view(dtype)
        except (RuntimeError, TypeError):
            continue  # quantised: no plain tensor has it
        with pytest.raises(mg.CheckpointError, match="a is "):
            mg.save({"a": tensor}, tmp_path / "checkpoint")


def test_safetensors_reads_the_files(tmp_path):
    state = {str(dtype): bits(dtype, 3, 2) for dtype in CODES} | {
        "__metadata__": torch.ones(2),
        "é": torch.ones(1),
    }
    path = mg.save(state, tmp_path / "checkpoint")
    (file,) = path.glob("*.safetensors")
    found = load_file(file)
    assert len(found) == len(state)
    assert torch.equal(found["torch.int64"], state["torch.int64"])
    assert found["é"].item() == 1
    assert all(raw_bytes(found[name]) == raw_bytes(state[name]) for name in found if name in state)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.permute(3, 1, 0, 2),
        lambda x: x[:, :1].contiguous(memory_format=torch.channels_last),
        lambda x: x[:1],
        lambda x: x.transpose(0, 1)[:, :, :1],
        lambda x: x[..., 1:],
        lambda x: x.flip(0),
        lambda x: x.as_strided((2, 2, 2), (1, 1, 1)),
    ],
)
def test_strides(make, tmp_path):
    tensor = make(torch.randn(2, 3, 4, 5))
    assert_equal({"x": tensor}, through_disk({"x": tensor}, tmp_path))


def test_lazily_conjugated_and_negated_tensors(tmp_path):
    z = torch.randn(4, 3, dtype=torch.complex64)
    state = {"conj": z.conj(), "plain": z, "imag": z.conj().imag, "t": z.t().conj()}
    loaded = through_disk(state, tmp_path)
    assert_equal(state, loaded)
    assert not loaded["conj"].is_conj()


def test_parameters_become_plain_tensors(tmp_path):
    layer = nn.Linear(2, 3)
    (layer.weight * 2).sum().backward()
    state = {"weight": layer.weight, "product": layer.weight * 2, "grad": layer.weight.grad}
    loaded = through_disk(state, tmp_path)
    assert_equal(state, loaded)
    assert type(loaded["weight"]) is torch.Tensor
    with torch.inference_mode():
        assert_equal({"x": torch.ones(2)}, through_disk({"x": torch.ones(2)}, tmp_path))


def test_tied_tensors_come_back_as_one(tmp_path):
    weight = nn.Parameter(torch.randn(3, 4))
    state = {
        "a": weight,
        "b": {"c": [weight, weight.data]},
        "view": weight.detach()[1:],
        "transposed": weight.detach().t(),
        "bits": weight.detach().view(torch.int32),
        "empty": [torch.empty(0), torch.empty(0)],
    }
    loaded = through_disk(state, tmp_path)
    assert_equal(state, loaded)
    assert loaded["a"] is loaded["b"]["c"][0] is loaded["b"]["c"][1]
    loaded["a"].zero_()
    assert torch.equal(loaded["view"], weight[1:])
    assert loaded["transposed"].abs().sum() > 0
    assert loaded["empty"][0] is not loaded["empty"][1]
    (file,) = (tmp_path / "checkpoint").glob("*.safetensors")
    assert len(load_file(file)) == 6


def test_loaded_tensors_are_aligned_apart_and_writable(tmp_path):
    state = {str(i): torch.full((i,), float(i)) for i in range(1, 40)}
    loaded = through_disk(state, tmp_path)
    for i, tensor in enumerate(loaded.values(), 1):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.add_(1)
        assert tensor.sum() == i * (i + 1)
    assert_equal(state, mg.load(tmp_path / "checkpoint"))


def test_large_states_are_split(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "SHARD_BYTES", 4096)
    monkeypatch.setattr("monograph.checkpoint.tensor_file.ARENA_BYTES", 1500)
    monkeypatch.setattr("monograph.checkpoint.tensor_file.CHUNK_BYTES", 1000)
    state = {f"{i}": bits(dtype, 40, i) for i, dtype in enumerate(CODES)} | {"big": torch.randn(5000)}
    assert_equal(state, through_disk(state, tmp_path))
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 4


def test_many_pieces_and_short_reads(tmp_path, monkeypatch):
    """The system may read and write less than was asked for."""
    state = {str(i): torch.full((i % 7,), i) for i in range(1500)} | {"big": torch.randn(700_000)}
    read, write = os.readv, os.write
    monkeypatch.setattr("os.write", lambda fd, data: write(fd, data[: max(len(data) // 3, 1)]))
    path = mg.save(state, tmp_path / "checkpoint")
    assert_equal(state, mg.load(path))
    monkeypatch.setattr("os.readv", lambda fd, views: read(fd, [next(filter(None, views))[:1000]]))
    assert_equal(state, mg.load(path))


def test_the_default_device_and_dtype_do_not_matter(tmp_path):
    state = {"x": torch.ones(3), "empty": torch.empty(0), "t": torch.randn(4, 4)[:, ::2], "n": np.zeros(0)}
    path = mg.save(state, tmp_path / "checkpoint")
    with torch.device("meta"):
        loaded = mg.load(path)
        mg.save(state, tmp_path / "second")
    assert_equal(state, loaded)
    assert_equal(state, mg.load(tmp_path / "second"))


# --- everything else -------------------------------------------------------------------------------------------

NAN_WITH_BITS = struct.unpack(">d", bytes.fromhex("7ff800000000beef"))[0]

VALUES = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**31, 2**63 - 1, -(2**63), 2**64, -(10**5000)],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, NAN_WITH_BITS],
    "complex": [1j, complex(-0.0, math.nan)],
    "strings": ["", "é", "\0", "\ud83d\ude00", "\ud83d", "😀", '"\\/\n', "a/b", "{"],
    "bytes": [b"", bytes(range(256))],
    "tuples": [(), (1, (2, [3]))],
    "keys": {
        1: "int",
        "1": "str",
        1.5: "float",
        None: "none",
        (1, ("a", None)): "tuple",
        b"x": 0,
        2**70: 0,
        -0.0: 0,
    },
    "bool keys": {True: 1, False: 0},
    "surrogate key": {"\ud83d\ude00": 1},
    "tags": {"tensor": "x", "dict": {"int": 1}},
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "counter": Counter("abca"),
    "defaultdicts": [defaultdict(None, a=1), defaultdict(list, a=[1]), defaultdict(dict, {1: {}})],
    "sets": [{1, "a", (2, None)}, frozenset({1.5}), set()],
    "deques": [deque([1, 2], maxlen=4), deque([[1]])],
    "sizes": [torch.Size([2, 3]), torch.Size([]), torch.Size([-1, 2**62])],
    "dtypes": [torch.float32, torch.bfloat16, torch.complex32],
    "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
    "numpy scalars": [
        np.float32(0.1),
        np.float64("nan"),
        np.int8(-3),
        np.bool_(True),
        np.str_("a\0"),
        np.bytes_(b"x\0"),
        np.complex64(1j),
        np.datetime64("2020-01-01T00:00", "m"),
        np.timedelta64(3, "s"),
        np.float16(-0.0),
    ],
    "arrays": [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(12).reshape(3, 4)[::-2, 1:3],
        np.array(3, ">i2"),
        np.zeros((0, 3), "c16"),
        np.zeros((2**50, 0, 2), "u1"),
        np.array(["a", "bcd"]),
        np.array([b"x"]),
        np.array(["2020-01-01"], "M8[D]"),
        np.array([True, False]),
    ],
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", VALUES)
def test_values(name, tmp_path):
    state = {"value": VALUES[name]}
    assert_equal(state, through_disk(state, tmp_path))


def test_random_states_of_python_and_numpy(tmp_path):
    import random

    state = {
        "python": random.getstate(),
        "numpy": np.random.RandomState(0).get_state(),
        "torch": torch.get_rng_state(),
    }
    loaded = through_disk(state, tmp_path)
    assert_equal(state, loaded)
    random.setstate(loaded["python"])
    np.random.RandomState(1).set_state(loaded["numpy"])


def test_a_fortran_array_is_still_one(tmp_path):
    loaded = through_disk({"x": np.asfortranarray(np.arange(6).reshape(2, 3))}, tmp_path)
    assert loaded["x"].flags.f_contiguous
    loaded["x"][0, 0] = 9


KEYS = st.one_of(
    st.text(max_size=5),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.tuples(st.integers()),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(codec=None), max_size=8),
    st.binary(max_size=8),
    hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)),
    st.builds(
        lambda dtype, shape, order: bits(dtype, *shape).permute(order(len(shape))),
        st.sampled_from(list(CODES)),
        st.lists(st.integers(0, 4), max_size=4),
        st.sampled_from([lambda n: tuple(range(n)), lambda n: tuple(reversed(range(n)))]),
    ),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda d: defaultdict(list, d)),
        st.lists(inner, max_size=3).map(deque),
        st.frozensets(KEYS, max_size=3),
    ),
    max_leaves=20,
)


@settings(max_examples=150)
@given(
    state=st.dictionaries(st.text(max_size=5), STATES, max_size=5).filter(lambda s: "graph.about" not in s)
)
def test_any_state(state, tmp_path_factory):
    assert_equal(state, through_disk(state, tmp_path_factory.mktemp("any")))


# --- what torch makes ------------------------------------------------------------------------------------------


def test_the_state_of_a_module_with_its_versions(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    loaded = through_disk(model.state_dict(), tmp_path)
    assert_equal(model.state_dict(), loaded)
    assert loaded._metadata == model.state_dict()._metadata
    model.load_state_dict(loaded)
    again = through_disk(loaded, tmp_path, "again")
    assert_equal(model.state_dict(), again)
    nested = through_disk({"model": model.state_dict()}, tmp_path, "nested")
    assert nested["model"]._metadata == model.state_dict()._metadata


OPTIMIZERS = [
    name
    for name, kind in sorted(vars(torch.optim).items())
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
]


def stepped(name: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 2))]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = getattr(torch.optim, name)(parameters if name == "LBFGS" else groups)
    take_step(optimizer, parameters)
    return optimizer, parameters


def take_step(optimizer, parameters):
    def closure():
        for parameter in parameters:
            gradient = (parameter.detach() * 0.5).cos()
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = gradient.to_sparse() if is_sparse else gradient
        return sum(parameter.detach().sin().sum() for parameter in parameters)

    optimizer.step(closure)


@pytest.mark.every_case
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_as_before(name, tmp_path):
    fresh = getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))])
    assert_equal(fresh.state_dict(), through_disk(fresh.state_dict(), tmp_path, "fresh"))
    optimizer, parameters = stepped(name)
    state = {"optimizer": optimizer.state_dict(), "parameters": parameters}
    loaded = through_disk(state, tmp_path)
    assert_equal(state, loaded)
    other, others = stepped(name)
    take_step(other, others)
    with torch.no_grad():
        for live, value in zip(others, loaded["parameters"], strict=True):
            live.copy_(value)
    other.load_state_dict(loaded["optimizer"])
    for one, its in ((optimizer, parameters), (other, others)):
        take_step(one, its)
    assert_equal(
        {"p": parameters, "o": optimizer.state_dict()},
        {"p": [p.detach() for p in others], "o": other.state_dict()},
    )


class Decay:
    """A schedule that is an object."""

    def __init__(self) -> None:
        self.rate = 0.9

    def __call__(self, step: int) -> float:
        return self.rate**step


SCHEDULERS = {
    "LambdaLR of a function": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "MultiplicativeLR of an object": lambda o: lr_scheduler.MultiplicativeLR(o, Decay()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "OneCycleLR linear": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, anneal_strategy="linear"),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "CyclicLR exp_range": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, mode="exp_range", gamma=0.9),
    "CyclicLR of a function": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, scale_fn=lambda x: 0.9**x),
    "CyclicLR of an object": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, scale_fn=Decay()),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.MultiStepLR(o, [2])], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.LambdaLR(o, lambda step: 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.every_case
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_as_before(name, tensor_lr, tmp_path):
    def make():
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def advance(optimizer, scheduler, steps):
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    optimizer, scheduler = make()
    advance(optimizer, scheduler, 3)
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    loaded = through_disk(state, tmp_path)
    assert_equal(state, loaded)
    other, its = make()
    other.load_state_dict(loaded["optimizer"])
    its.load_state_dict(loaded["scheduler"])
    assert advance(other, its, 6) == advance(optimizer, scheduler, 6)


def test_what_a_graph_says_of_itself(tmp_path):
    about = {"graph": "TrainStep", "programs": ["ab" * 32], "optimizers": {"0": "torch.optim.AdamW"}, "n": 3}
    loaded = through_disk({"graph.about": about, "x": torch.ones(1)}, tmp_path)
    assert dict(loaded.about) == loaded["graph.about"] == about
    assert loaded.path == tmp_path / "checkpoint"
    assert '"about": {"graph":"TrainStep"' in (loaded.path / "manifest.json").read_text()
    assert dict(through_disk({"x": 1}, tmp_path).about) == {}
