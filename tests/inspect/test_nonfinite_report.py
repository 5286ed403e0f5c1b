"""find_nonfinite: the NaN that comes of an infinity, what stays finite, what is harmless, and values that have grown."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from monograph.inspect.nonfinite_report import Nonfinite

INF = float("inf")


class Layer(nn.Module):
    """A linear layer, and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


def exp_over_its_sum(h: Tensor) -> Tensor:
    powers = torch.exp(h * 1000.0)  # overflows
    return powers / powers.sum(-1, keepdim=True)  # inf / inf


def norm_or_zero(h: Tensor) -> Tensor:
    square = (h - h).square().sum(-1)
    return h.sum(-1) + torch.where(square > 0, square.sqrt(), 0.0)  # its gradient is 0 / 0


def attention(h: Tensor) -> Tensor:
    scores = h @ h.transpose(-1, -2)
    return scores.masked_fill(torch.ones(8, 8).triu(1) > 0, -INF).softmax(-1) @ h  # mask


def train(
    model: nn.Module, loss: Callable[..., Tensor] = nn.functional.mse_loss, *, rate: float = 0.1
) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mg.train_graph(model, loss, torch.optim.SGD(model.parameters(), lr=rate))


def batch() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def line(found: Nonfinite | None) -> str:
    assert found is not None
    return linecache.getline(found.where.file, found.where.line).strip()


def test_the_nan_that_comes_of_an_overflow() -> None:
    graph, x = train(Layer(exp_over_its_sum)), batch()
    report = graph.find_nonfinite(x, torch.zeros(8, 4))
    assert (report.found.kind, report.nan.kind) == ("Inf", "NaN")
    assert line(report.found).endswith("# overflows")
    assert line(report.nan).endswith("# inf / inf")
    assert any(operand.value.num_inf for operand in report.nan.operands)
    assert report.state == ("model.fc.weight", "model.fc.bias")
    assert report.found.reason.startswith("exp overflows f32 above 88.7228, and the largest input is ")
    assert report.hint.startswith("torch.log_softmax()")  # no parameter is large
    text = str(report)
    assert text.index("the first Inf is made by aten.exp") < text.index("the first NaN is made by aten.div")


def test_an_infinity_and_a_nan_of_another_kind_have_both_hints() -> None:
    def log_of_parts(h: Tensor) -> Tensor:
        parts = h / h.norm(dim=-1, keepdim=True)
        return torch.where(parts > 0, torch.log(parts), parts).sum(-1)

    x = batch()
    x[2] = 1e30
    report = train(Layer(log_of_parts)).find_nonfinite(x, torch.zeros(8))
    assert (report.found.kind, report.nan.kind) == ("Inf", "NaN")
    assert "torch.where(x > 0, torch.log(torch.where(x > 0, x, 1)), 0)" in report.hint


def test_a_nan_of_backward_alone() -> None:
    report = train(Layer(norm_or_zero)).find_nonfinite(batch(), torch.zeros(8))
    assert (report.found.kind, report.found.where.phase) == ("NaN", "backward")
    assert line(report.found).endswith("# its gradient is 0 / 0")
    assert report.nan is None
    assert report.reached == report.state == ("model.fc.weight", "model.fc.bias")
    assert "\nall of the results stay finite" in str(report)
    assert "it divides by 0" in str(report)


def test_a_loss_of_infinity_that_the_state_does_not_get() -> None:
    class Logged(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(4, 4)
            self.add_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

        def build(self, x: Tensor) -> tuple[Tensor, Tensor]:
            loss = self.model(x).square().mean()
            loss.backward()
            return loss, (x - x).sum().log()

    report = Logged().find_nonfinite(batch())
    assert report.reached == ("result.1",)
    assert not report.state
    assert "\nall of the new state stays finite" in str(report)
    assert "log needs inputs above 0, and has 0" in str(report)


def test_a_mask_reaches_nothing() -> None:
    report = train(Layer(attention)).find_nonfinite(batch(), torch.zeros(8, 4))
    assert report.ok
    (found,) = report.inside
    assert (found.kind, found.reaches) == ("Inf", ())
    assert line(found).endswith("# mask")
    assert "reaches none of them: the Inf of aten.masked_fill" in str(report)


def test_an_overflow_inside_a_finite_step_comes_before_masks() -> None:
    def masked_and_squashed(x: Tensor) -> Tensor:
        return x.masked_fill(x > 2, -INF).softmax(-1) + torch.exp(x * 100.0).tanh()

    report = mg.trace(masked_and_squashed).find_nonfinite(torch.tensor([1.0, 2.0, 3.0]))
    assert report.ok
    assert [found.op.partition("(")[0] for found in report.inside] == [
        "aten.exp.default",
        "aten.masked_fill.Scalar",
    ]
    assert str(report).endswith(
        "exp overflows f32 above 88.7228, and the largest input is 300, and of 1 more op"
    )


def test_a_mask_that_is_a_result_is_not_called_finite() -> None:
    report = mg.trace(lambda x: x.masked_fill(x > 0, -INF)).find_nonfinite(torch.tensor([1.0, -1.0]))
    assert report.ok
    assert report.meant == ("result.0",)
    assert not report.inside
    assert str(report).endswith("but for infinities that came in or that the code writes: result.0")


def test_a_finite_step_says_no_more() -> None:
    report = train(nn.Linear(4, 4)).find_nonfinite(batch(), torch.zeros(8, 4))
    assert str(report) == f"{report.graph}: all results and all new state are finite"


def test_the_mask_of_a_whole_row_is_named_with_its_nan() -> None:
    report = mg.trace(lambda x: x.masked_fill(x < 9, -INF).softmax(-1)).find_nonfinite(torch.ones(3))
    assert report.found is not None
    assert report.found.op.startswith("aten._softmax")
    (written,) = report.found.written
    assert written.startswith("aten.masked_fill")
    assert f"an Inf was made by {written}" in str(report)


def test_training_that_diverges() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    graph, x = train(model, rate=50.0), batch()
    graph.config.detect_nonfinite()

    def until_it_stops() -> None:
        for _ in range(20):
            graph(x, torch.ones(8, 1))

    with pytest.raises(mg.NonfiniteError) as caught:
        until_it_stops()
    advice = "before the step: if it has grown in training, lower the learning rate or clip the gradients"
    assert caught.value.hint.endswith(advice)
    report = graph.find_nonfinite(x, torch.ones(8, 1))
    path, size = report.hint.split(" reaches ")
    largest = max(model.parameters(), key=lambda parameter: float(parameter.detach().abs().max()))
    assert dict(graph.model.named_parameters())[path.removeprefix("model.")] is largest
    assert size.startswith(f"{float(largest.detach().abs().max()):.3g}")


def test_an_update_that_overflows() -> None:
    model = nn.Linear(4, 1)
    graph = mg.train_graph(model, lambda made, y: (made - y).sum(), torch.optim.Adam(model.parameters()))
    report = graph.find_nonfinite(batch() * 1e25, torch.ones(8, 1))  # a gradient, whose square overflows
    assert report.found.where.phase == "update"
    assert report.hint.startswith("the update overflows: clip the gradients")
    assert set(report.reached) == set(report.state)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("function", "values", "reason"),
    [
        (torch.log, [1.0, -2.0], "log needs inputs above 0, and has -2 to 1"),
        (torch.rsqrt, [0.0], "rsqrt needs inputs above 0, and has 0"),
        (lambda x: 1 / x, [2.0, 0.0], "it divides by 0"),
        (lambda x: x / (x < 2), [3.0], "it divides by 0"),
        (lambda x: x**-2, [0.0], "it divides by 0"),
        (lambda x: x**-0.5, [0.0], "pow needs inputs above 0, and has 0"),
        (lambda x: x**0.5, [-1.0], "pow needs inputs of 0 or more, and has -1"),
        (lambda x: x**1.5, [-1.0], "pow needs inputs of 0 or more, and has -1"),
        (lambda x: 1 / x, [1e-39], "the divisor nearest to 0 is 1e-39"),
        (torch.exp, [-900.0, 89.0], "exp overflows f32 above 88.7228, and the largest input is 89"),
        (lambda x: x.half().exp(), [12.0], "exp overflows f16 above 11.0899, and the largest input is 12"),
        (lambda x: x**3, [-1e13], "pow overflows f32 above 6.98146e+12, and the largest input is 1e+13"),
        (lambda x: x * x, [1e20], "f32 ends at 3.40282e+38, and the largest input is 1e+20"),
        (lambda x: x.half(), [7e4], "f16 ends at 65504, and the largest input is 70000"),
        (lambda x: torch.fmod(x, x - x), [1.0], ""),
    ],
)
def test_the_range_that_led_to_it(
    function: Callable[[Tensor], Tensor], values: list[float], reason: str
) -> None:
    report = mg.trace(lambda x: function(x).sum()).find_nonfinite(torch.tensor(values))
    assert report.found is not None, str(report)
    assert report.found.reason == reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (torch.sqrt, "it divides by 0: sqrt of 0 has no finite gradient"),
        (lambda x: x.square().sum(-1).sqrt(), "it divides by 0: sqrt of 0 has no finite gradient"),
        (lambda x: 1 / (2 * torch.sqrt(x)), "it divides by 0"),
        (lambda x: x.abs() ** 0.25, "pow needs inputs above 0, and has 0"),
    ],
)
def test_the_reason_of_a_gradient_at_0(function: Callable[[Tensor], Tensor], reason: str) -> None:
    graph = train(Layer(lambda x: function(x * 0.0)))
    report = graph.find_nonfinite(batch(), torch.zeros(8, 1))
    assert report.found is not None, str(report)
    assert report.found.reason == reason


@pytest.mark.parametrize(
    ("function", "of", "hint"),
    [
        (torch.sqrt, "sqrt", "torch.sqrt(x + 1e-12) has a finite gradient"),
        (lambda x: (x + 1).acos(), "acos", "torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6))"),
        (lambda x: x.abs() ** 0.25, "pow", "(x + 1e-12) ** n has a finite gradient"),
        (
            lambda x: torch.where(x > 0, x.log(), 0),
            "log",
            "choose the input too, as in torch.where(x > 0, torch.log(",
        ),
    ],
)
def test_a_gradient_names_its_op_and_what_to_write(
    function: Callable[[Tensor], Tensor], of: str, hint: str
) -> None:
    graph = train(Layer(lambda x: function(x * 0.0)))
    report = graph.find_nonfinite(batch(), torch.full((8, 1), 9.0))
    assert report.found is not None, str(report)
    assert f"(backward: the gradient of {of})" in str(report)
    assert hint in report.hint
    assert str(report).endswith(f"hint: {report.hint}")


@pytest.mark.parametrize(
    ("function", "reason", "hint"),
    [
        (lambda x: x.log() * x, "0 * Inf is NaN", "torch.where(mask, x, 0) chooses"),
        (lambda x: x.masked_fill(x < 1, -math.inf).softmax(0), "a row of nothing but -Inf", "in each row"),
        (lambda x: 1 / (x * 0), "it divides by 0", "torch.where(x == 0, 1, x)"),
    ],
)
def test_what_to_write_for_an_op(function: Callable[[Tensor], Tensor], reason: str, hint: str) -> None:
    report = mg.trace(lambda x: function(x).sum()).find_nonfinite(torch.zeros(3))
    named = report.nan or report.found
    assert named is not None, str(report)
    assert named.reason.startswith(reason)
    assert hint in report.hint or named is report.nan


def test_a_learning_rate_that_is_nan_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = mg.train_graph(model, nn.MSELoss(), optimizer)
    batch = torch.ones(4, 3), torch.ones(4, 2)
    step(*batch)
    optimizer.param_groups[0]["lr"] = float("nan")
    report = step.find_nonfinite(*batch)
    assert report.found is not None
    assert "given NaN as a number of Python, such as a learning rate" in report.found.reason
    assert "optimizer.0/group0/lr = nan: look at what sets it" in str(report)
    assert 'optimizer.param_groups[0]["lr"] is no finite number' in caplog.text
    assert "lr changed from a finite number to nan" in caplog.text
    assert "see docs/debugging.md" in caplog.text


@pytest.mark.parametrize("name", ["sqrt", "rsqrt", "log", "log2", "log10", "pow"])
def test_what_is_to_be_written_for_inputs_below_0_is_finite(name: str) -> None:
    """The hint is followed to the letter: both forms that it gives train without a NaN."""
    n = 0.5
    function = (lambda x: torch.pow(x, n)) if name == "pow" else getattr(torch, name)
    report = train(Layer(lambda x: function(x - 9.0))).find_nonfinite(batch(), torch.zeros(8, 1))
    forms = r"(torch\.\w+\(.*\)) is finite, and so is .* as in (torch\.where\(.*\))"
    written = re.fullmatch(forms, report.hint)
    assert written is not None, report.hint
    for form in written.groups():
        of_hint = eval(f"lambda x: {form}", {"torch": torch, "n": n})
        for away in (9.0, 0.0):
            mended = train(Layer(lambda x, f=of_hint, away=away: f(x - away)))
            assert mended.find_nonfinite(batch(), torch.zeros(8, 1)).found is None
