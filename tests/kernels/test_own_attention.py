"""Attention by code of our own: as near to float64 as torch's kernel, with its NaNs, and chosen where it is faster."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import monograph as mg
from monograph.ir.meta import compute_nodes
from monograph.kernels import compile as workshop_module
from monograph.kernels.attention import BACKWARD, FORWARD
from monograph.kernels.candidates import fitting, forms_of
from monograph.kernels.compile import KernelCompiler
from monograph.kernels.own import OWN
from monograph.layout import Layout
from monograph.native import Attention
from monograph.native.attention import BY_POSITIONS
from monograph.numerics.judge import against_float64
from tests.kernels.programs import program_of, rewritten, run, steps, targets, with_code

COMPILER = KernelCompiler()  # of this processor: what several tests use is compiled once
PARTS = ("result", "logarithms", "of q", "of k", "of v")


def heads(*sizes: int, lies: str = "apart") -> torch.Tensor:
    """Numbers for each image, head and position, as models lay them."""
    images, count, positions, deep = sizes
    if lies == "apart":
        return torch.randn(sizes)
    if lies == "positions first":
        return torch.randn(positions, images * count, deep).transpose(0, 1).view(sizes)
    if lies == "beside queries and values":
        return torch.randn(images, positions, 3, count, deep)[:, :, 1].transpose(1, 2)
    return torch.randn(images, positions, count, deep).transpose(1, 2)


def eager(q, k, v, grad, is_causal, scale):
    """What torch's kernels give for all tensors, in their type."""
    out, logarithms = FORWARD(q, k, v, 0.0, is_causal, scale=scale)
    return out, logarithms, *BACKWARD(grad, q, k, v, out, logarithms, 0.0, is_causal, scale=scale)


def ours(q, k, v, grad, is_causal, scale, threads=1, compiler=COMPILER):
    """The same by our code; the gradients from torch's results."""
    out, logarithms = FORWARD(q, k, v, 0.0, is_causal, scale=scale)
    forward = code(Attention.of, (q, k, v), is_causal, scale, threads, BY_POSITIONS)
    backward = code(Attention.of_gradient, (grad, q, k, v, out, logarithms), is_causal, scale, threads)
    (images, count, queries, deep), keys = q.shape, k.shape[2]
    blocks = {
        "forward": compiler.compiled(forward).once(q, k, v),
        "backward": compiler.compiled(backward).once(grad, q, k, v, out, logarithms),
    }
    for block, positions, *rest in (
        ("forward", queries, deep),
        ("forward", queries),
        ("backward", queries, deep),
        ("backward", keys, deep),
        ("backward", keys, deep),
    ):
        shape = (images, positions, count, *rest)
        part, blocks[block] = blocks[block].tensor_split([math.prod(shape)])
        yield part.view(shape).transpose(1, 2)


def code(make, tensors, is_causal, scale, threads=1, *order) -> Attention:
    """Our code for tensors."""
    scale = 1 / math.sqrt(tensors[0].shape[-1]) if scale is None else scale
    return make([Layout(item.shape, item.stride()) for item in tensors], [is_causal, scale, *order], threads)


def assert_near(q, k, v, grad, is_causal, scale=None, compiler=COMPILER) -> None:
    """Each result is about as near to float64 as torch's; an error of a score counts as much as the score is large."""
    exact = eager(*(item.double() for item in (q, k, v, grad)), is_causal, scale)
    theirs = eager(q, k, v, grad, is_causal, scale)
    made = ours(q, k, v, grad, is_causal, scale, compiler=compiler)
    score = (scale or 1 / math.sqrt(q.shape[-1])) * (q.norm(dim=-1).max() * k.norm(dim=-1).max())
    for name, got, known, wanted in zip(PARTS, made, theirs, exact, strict=True):
        assert got.shape == wanted.shape, name
        size = wanted.abs().max().clamp(min=1)
        assert (got - wanted).abs().max() <= 4 * (known - wanted).abs().max() + 4e-7 * size * (1 + score), (
            name
        )


LIES = st.sampled_from(["apart", "beside queries and values", "by positions"])


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70)),
    deep=st.integers(1, 70),
    lies=st.tuples(LIES, LIES, LIES, LIES),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3, 2.0]),
)
def test_every_size_and_layout(sizes, deep, lies, is_causal, scale):
    images, count, queries, keys = sizes
    positions = (queries, keys, keys, queries)
    tensors = [heads(images, count, size, deep, lies=how) for size, how in zip(positions, lies, strict=True)]
    assert_near(*tensors, is_causal, scale)


@pytest.mark.one_case
@pytest.mark.parametrize("missing", [[], ["__AVX512F__"], ["__AVX512F__", "__AVX2__"]])
@pytest.mark.parametrize(
    ("images", "count", "queries", "keys", "deep", "is_causal"),
    [
        (2, 3, 65, 65, 64, False),
        (2, 2, 128, 128, 32, True),
        (1, 2, 100, 30, 20, True),
        (1, 1, 5, 90, 130, True),
    ],
)
def test_processors_with_less(missing, images, count, queries, keys, deep, is_causal, monkeypatch):
    """Registers of half the width, and none."""
    compile_as_it_is = workshop_module.compile_to_functions
    without = "".join(f"#undef {name}\n" for name in missing)
    monkeypatch.setattr(
        workshop_module, "compile_to_functions", lambda text, goal: compile_as_it_is(without + text, goal)
    )
    positions = (queries, keys, keys, queries)
    assert_near(
        *(heads(images, count, size, deep) for size in positions), is_causal, compiler=KernelCompiler()
    )


@pytest.mark.long
def test_scores_of_any_size():
    """Also where the largest is far from the others, and the sum of powers would be infinite."""
    q, k, v, grad = (heads(1, 2, 20, 8) for _ in range(4))
    assert_near(q * 40, k * 40, v, grad, False)
    assert_near(q * 40, k * 40, v, grad, True)


SPECIAL = {
    "NaN in a query": ("q", float("nan")),
    "infinite query": ("q", float("inf")),
    "NaN in a key": ("k", float("nan")),
    "infinite key": ("k", -float("inf")),
    "NaN in a value": ("v", float("nan")),
    "infinite value": ("v", float("inf")),
    "NaN in the gradient": ("grad", float("nan")),
}


@pytest.mark.one_case
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", SPECIAL)
def test_what_is_not_finite(case, is_causal):
    """It is not finite where torch's results are not, and elsewhere only where torch's kernel loses a NaN."""
    name, number = SPECIAL[case]
    tensors = {item: heads(1, 2, 12, 8) for item in ("q", "k", "v", "grad")}
    tensors[name][0, 1, 11, 3] = number
    tensors["q" if name == "k" else "k"][0, 1, :, 3] = torch.rand(12) + 0.1
    theirs = eager(*tensors.values(), is_causal, None)
    for part, got, known, plain in zip(
        PARTS,
        ours(*tensors.values(), is_causal, None),
        theirs,
        formula(**tensors, is_causal=is_causal),
        strict=True,
    ):
        lost = plain.isnan() & ~known.isnan()
        torch.testing.assert_close(
            got, known.masked_fill(lost, math.nan), rtol=1e-4, atol=1e-5, equal_nan=True, msg=part
        )


def formula(q, k, v, grad, *, is_causal):
    """Attention as it is defined."""
    given = [item.clone().requires_grad_() for item in (q, k, v)]
    scores = given[0] @ given[1].transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    made = scores.softmax(-1) @ given[2]
    made.backward(grad)
    return made.detach(), scores.detach().logsumexp(-1), *(item.grad for item in given)


def test_queries_that_see_nothing():
    """All scores are -infinity: the result is 0, as torch's; a NaN among them is not lost."""
    q, k = torch.ones(1, 1, 12, 8), torch.full((1, 1, 12, 8), -math.inf)
    v, grad = heads(1, 1, 12, 8), heads(1, 1, 12, 8)
    made, logarithms, *_ = ours(q, k, v, grad, False, None)
    known, sums, *_ = eager(q, k, v, grad, False, None)
    torch.testing.assert_close(made, known)
    torch.testing.assert_close(logarithms, sums)
    k[0, 0, 7, 1] = math.nan
    made, logarithms, *_ = ours(q, k, v, grad, False, None)
    assert made.isnan().all()
    assert logarithms.isnan().all()


@pytest.mark.long
def test_threads_share_heads():
    tensors = [heads(3, 3, 64, 32) for _ in range(4)]  # enough work for several
    for alone, shared in zip(ours(*tensors, True, None), ours(*tensors, True, None, 3), strict=True):
        assert torch.equal(alone, shared)
    described = [Layout(item.shape, item.stride()) for item in tensors[:3]]
    assert Attention.of(described, [True, 1.0, BY_POSITIONS], 3).used_threads == 3
    assert Attention.of([Layout.contiguous(3, 3, 4, 4)] * 3, [True, 1.0, BY_POSITIONS], 3).used_threads == 1


def attention(*tensors, **options):
    """A program with attention and its backward."""

    def both(emit, q, k, v, grad, *mask):
        given = {"attn_mask": mask[0]} if mask else {}
        dropout = options.get("dropout", 0.0)
        made = emit(FORWARD, q, k, v, dropout, options.get("is_causal", False), **given)
        out, logarithms = (emit(operator.getitem, made, i) for i in range(2))
        back = emit(
            BACKWARD, grad, q, k, v, out, logarithms, dropout, options.get("is_causal", False), **given
        )
        return out, *(emit(operator.getitem, back, i) for i in range(3))

    return program_of(both, *tensors)


def offered(program) -> list[list[str]]:
    """The forms that are tried for each op of attention."""
    return [
        [form.name for form in forms_of(node, fitting(node, OWN[node.target]))]
        for node in compute_nodes(program.graph)
        if node.target in (FORWARD, BACKWARD)
    ]


@pytest.mark.one_case
@pytest.mark.parametrize("lies", ["apart", "beside queries and values", "by positions", "positions first"])
def test_it_gives_the_layout_of_torchs_results(lies):
    tensors = [heads(2, 3, 9, 8, lies=lies) for _ in range(4)]
    program = attention(*tensors, is_causal=True)
    assert offered(program) == [["aten", "own"], ["aten", "own"]]
    chosen = rewritten(program)
    assert not any("scaled_dot_product" in name for name in targets(chosen))
    exact = run(program, *(item.double() for item in tensors))
    made = zip(
        run(program, *tensors), run(chosen, *tensors), run(with_code(chosen), *tensors), exact, strict=True
    )
    for eager, shown, coded, wanted in made:
        assert steps(shown) == steps(coded) == steps(eager)
        assert torch.equal(shown, eager)
        torch.testing.assert_close(coded.double(), wanted, rtol=1e-5, atol=1e-5)


OTHERS = {
    "mask": lambda: attention(*(heads(1, 2, 9, 8) for _ in range(4)), torch.zeros(9, 9)),
    "half type": lambda: attention(*(heads(1, 2, 9, 8).bfloat16() for _ in range(4))),
    "float64": lambda: attention(*(heads(1, 2, 9, 8).double() for _ in range(4))),
    "long": lambda: attention(*(heads(1, 1, 3000, 64) for _ in range(4))),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_attention_is_left_alone(case):
    assert all(names == ["aten"] for names in offered(OTHERS[case]()))


def test_what_it_is_not_made_for():
    plain = Layout.contiguous(2, 4, 16, 8)
    assert Attention.of([plain] * 3, [False, 1.0, BY_POSITIONS], 1).can_be_made
    for scale in (math.inf, 0.0, -1.0):  # of torch's masked scores these make NaN
        assert not Attention.of([plain] * 3, [False, scale, BY_POSITIONS], 1).can_be_made
    shared = Layout.contiguous(2, 2, 16, 8)  # heads of keys for several heads of queries
    assert not Attention.of([plain, shared, shared], [False, 1.0, BY_POSITIONS], 1).can_be_made
    assert not Attention.of([Layout.contiguous(2, 4, 0, 8)] * 3, [False, 1.0, BY_POSITIONS], 1).can_be_made
    far = Layout((4, 4, 16, 8), (1 << 30, 128, 8, 1))
    assert not Attention.of([far] * 3, [False, 1.0, BY_POSITIONS], 1).can_be_made


class Attending(nn.Module):
    """Causal attention among the positions of a sequence, and one without an order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 3 * 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Five numbers for each position."""
        q, k, v = (item.unflatten(-1, (2, 8)).transpose(1, 2) for item in self.first(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = F.scaled_dot_product_attention(y, k.contiguous(), v, scale=0.5)
        return self.last(y.transpose(1, 2).flatten(2))


def trained(dtype: torch.dtype, backend: str | None = None):
    """The losses of four steps and the state afterwards, and the graph."""
    torch.manual_seed(0)
    model = Attending().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = [(torch.randn(3, 20, 12).to(dtype), torch.randn(3, 20, 5).to(dtype)) for _ in range(4)]
    graph = mg.train_graph(model, nn.MSELoss(), optimizer)
    graph.config.backend(backend or "aten")
    losses = [graph(*batch).detach().clone() for batch in batches]
    return {f"loss.{i}": item for i, item in enumerate(losses)} | model.state_dict(), graph


@pytest.mark.long
@pytest.mark.parametrize("chosen", [("attention", "backward"), ("backward",), ("attention",)])
def test_a_compiled_step(chosen, monkeypatch):
    """Forward, backward, or both by our code: they fit each other's and torch's."""

    def seconds_of(forms, *_):
        ops = [node.target.__name__ for node in forms[-1].graph.nodes if node.op == "call_function"]
        wanted = any(name.partition(".")[0].endswith(chosen) for name in ops)
        return {form.name: 1.0 if wanted and form.name == "own" else 2.0 for form in forms}

    monkeypatch.setattr("monograph.kernels.select.seconds_of", seconds_of)
    exact, eager_state = trained(torch.float64)[0], trained(torch.float32)[0]
    state, graph = trained(torch.float32, "inductor")
    assert graph.backend == "inductor"
    text = graph.show("kernels")
    assert ("torch.ops.monograph.attention.default(" in text) == ("attention" in chosen)
    assert ("torch.ops.monograph.attention_backward.default(" in text) == ("backward" in chosen)
    assert against_float64(exact, eager_state, state).ok
