"""Wrong buckets are an error with the user's line, and change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import monograph as mg
from tests.graph.error_checks import check
from tests.padding.language import SIZES, Step, batches
from tests.support import assert_same


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ([], "there are no sizes"),
        ([8, 4], "4 comes after 8"),
        ([4, 8, 8], "8 comes after 8"),
        ([0, 8], "0 is no size"),
        ([-4, 8], "-4 is no size"),
        ([4.0, 8], "4.0 is no size"),
        ([True, 8], "True is no size"),
        ("48", "is no list of sizes"),
        (32, "is no list of sizes"),
        (None, "is no list of sizes"),
        ({4, 8}, "is no list of sizes"),
    ],
)
def test_sizes(sizes: Any, part: str) -> None:
    with pytest.raises(mg.ConfigError) as caught:
        mg.buckets("ids", dim=1, sizes=sizes)  # at: sizes
    check(caught.value, "buckets('ids', ...)", part, at="sizes")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"argument": ""}, "name of one of build()"),
        ({"argument": "a b"}, "name of one of build()"),
        ({"argument": 3}, "name of one of build()"),
        ({"dim": 1.0}, "dim=1.0"),
        ({"dim": True}, "dim=True"),
        ({"pad": "0"}, "pad='0'"),
        ({"pad": None}, "pad=None"),
        ({"pad": torch.tensor(0)}, "is a Tensor"),
        ({"mask": 1}, "mask=1"),
        ({"mask": "ids"}, "mask='ids'"),
        ({"group": 1}, "group=1"),
    ],
)
def test_others(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(mg.ConfigError) as caught:
        mg.buckets(**{"argument": "ids", "dim": 1, "sizes": SIZES, **arguments})  # at: others
    check(caught.value, part, at="others")


@pytest.mark.parametrize("given", [(), ("ids",), (None, None), ([mg.buckets("labels", 1, SIZES)],)])
def test_what_the_configuration_takes(given: tuple[Any, ...]) -> None:
    step = Step(mg.buckets("ids", 1, SIZES))
    before = step.config.settings
    with pytest.raises(mg.ConfigError) as caught:
        step.config.buckets(*given)  # at: given
    check(caught.value, "config.buckets()", at="given")
    assert step.config.settings is before


def test_two_of_one_argument_and_dimension() -> None:
    step = Step(mg.buckets("ids", 1, SIZES))
    before = step.config.settings
    with pytest.raises(mg.ConfigError) as caught:
        step.config.buckets(
            mg.buckets("labels", 1, SIZES),
            mg.buckets("ids", 1, [7]),  # at: twice
        )
    check(caught.value, "has buckets already", at="twice")
    assert step.config.settings is before


def ids(**others: Any) -> Any:
    return mg.buckets(**{"argument": "ids", "dim": 1, "sizes": SIZES, **others})  # at: declared


@pytest.mark.parametrize(
    ("buckets", "part"),
    [
        (lambda: ids(pad=0.5), "pad=0.5 is a float, and ids is a tensor of torch.int64"),
        (lambda: ids(pad=0.0), "pad=0.0 is a float"),
        (lambda: ids(pad=True), "pad=True is a bool"),
        (lambda: ids(pad=2**63), "cannot hold it"),
        (lambda: ids(argument="tokens"), "build() has no argument tokens"),
        (lambda: ids(argument="ids[0]"), "there is no such tensor"),
        (lambda: ids(dim=2), "no dimension 2 in a tensor of 2"),
        (lambda: ids(dim=-3), "no dimension -3"),
        (lambda: ids(mask="where"), "build() has no argument where"),
    ],
)
def test_errors_of_a_call(buckets: Any, part: str) -> None:
    step = Step(buckets())
    ((given, labels),) = batches(5)
    state, random = copy.deepcopy(step.state_dict()), torch.get_rng_state()
    for run in (step, step.eager, step.verify, step.compile):
        with pytest.raises(mg.ConfigError) as caught:
            run(given, labels)
        check(caught.value, part, at="declared")
    assert_same(state, step.state_dict())
    assert torch.equal(random, torch.get_rng_state())
    assert not step.builds
    step.config.buckets(None)
    step(given, labels)


@pytest.mark.parametrize("pad", [0, 1.5, float("inf"), float("nan"), 0.1, -100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_padding_that_fits(pad: float, dtype: torch.dtype) -> None:
    mg.buckets("x", 0, SIZES, pad).check_pad(dtype)


@pytest.mark.parametrize(
    ("pad", "dtype"),
    [
        (True, torch.float32),
        (1e300, torch.float32),
        (1e6, torch.float16),
        (2**24 + 1, torch.float32),
        (257, torch.bfloat16),
        (10**400, torch.float64),
        (-1, torch.uint8),
        (128, torch.int8),
        (2, torch.bool),
        (0.0, torch.bool),
        (1.0, torch.int32),
        (False, torch.int32),
    ],
)
def test_padding_that_does_not_fit(pad: Any, dtype: torch.dtype) -> None:
    with pytest.raises(mg.ConfigError, match="cannot hold it"):
        mg.buckets("x", 0, SIZES, pad).check_pad(dtype)
    mg.buckets("x", 0, SIZES, 1).check_pad(dtype)


def test_tied_arguments_of_different_sizes() -> None:
    step = Step(mg.buckets("ids", 1, SIZES), mg.buckets("labels", 1, SIZES, -100))
    ((given, labels),) = batches(5)
    step(given, labels)
    state = copy.deepcopy(step.state_dict())
    with pytest.raises(mg.SignatureError) as caught:
        step(given, labels[:, :4])  # at: tied
    check(caught.value, "ids (dim 1) has the size 5", "labels (dim 1) has 4", "group=", at="tied")
    assert_same(state, step.state_dict())
    step(given, labels)


@pytest.mark.parametrize(
    ("x", "kind", "part"),
    [
        (torch.ones(3, requires_grad=True), mg.SignatureError, "requires grad"),
        (torch.ones(3).to_sparse(), mg.SignatureError, "sparse"),
        (torch.nn.Parameter(torch.ones(3), requires_grad=False), mg.SignatureError, "Parameter"),
        (3.0, mg.ConfigError, "it is a float"),
        ([torch.ones(3)], mg.ConfigError, "no such tensor"),
    ],
)
def test_what_is_not_padded(x: Any, kind: Any, part: str) -> None:
    step = mg.trace(lambda x: x)
    step.config.buckets(mg.buckets("x", 0, SIZES))
    with pytest.raises(kind) as caught:
        step(x)
    check(caught.value, part)


def test_a_step_that_fails_is_not_counted() -> None:
    class Failing(Step):
        def build(self, ids, labels):  # type: ignore[no-untyped-def, override]
            if ids.shape[1] == 4:
                raise KeyError("four")
            return super().build.__wrapped__(self, ids, labels)  # type: ignore[attr-defined]

    step = Failing(mg.buckets("ids", 1, SIZES), mg.buckets("labels", 1, SIZES, -100))
    state = copy.deepcopy(step.state_dict())
    with pytest.raises(KeyError, match="four"):
        step(*batches(3)[0])
    assert_same(state, step.state_dict())
    assert "step(s)" not in repr(step.config)
    step(*batches(7)[0])
    assert "in 1 step(s)" in repr(step.config)
