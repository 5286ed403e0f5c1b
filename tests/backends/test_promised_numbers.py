"""Tensors that are conjugated or negated by a bit alone, as arguments, buffers and weights of compiled steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import monograph as mg

Z = torch.complex(torch.linspace(-1.0, 2.0, 12), torch.linspace(3.0, -1.0, 12)).reshape(3, 4)

FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negated": lambda z: z.conj().imag,
    "transposed": lambda z: z.conj().imag.t(),
    "expanded": lambda z: z[:1].conj().imag.expand(3, 4),
    "a part": lambda z: z.conj().imag[1:, ::2],
    "one": lambda z: z.conj().imag[0, 0],
    "plain": lambda z: z.imag,
}


class Step(mg.Graph):
    """Updates a buffer in place for each argument, and returns views of the argument and of the buffer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.module = nn.Module()
        for index in range(count):
            self.module.register_buffer(f"buffer{index}", Z.clone().conj().imag)

    def build(self, *given: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [body(buffer, x) for buffer, x in zip(self.module.buffers(), given, strict=True)]


def body(buffer: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = x * 2 + 1
    buffer.mul_(0.5).add_(x.sum())
    return out, x.unsqueeze(0), (buffer * out.sum()).sum(), torch.cat([x.reshape(-1), buffer.reshape(-1)])


@pytest.mark.parametrize(
    ("forms", "backend"),
    [
        *(pytest.param([form], "aten", id=form) for form in FORMS),
        pytest.param(["transposed", "expanded", "a part"], "inductor", id="compiled"),
    ],
)
def test_negation_by_a_bit(forms: list[str], backend: str) -> None:
    graph = Step(len(forms))
    graph.config.backend(backend)
    buffers = [Z.clone().conj().imag for _ in forms]
    given, of_graph = ([FORMS[form](Z.clone()) for form in forms] for _ in range(2))
    for _ in range(2):
        expected, made = list(map(body, buffers, given)), graph(*of_graph)
        torch.testing.assert_close(made, expected)
        torch.testing.assert_close(list(graph.module.buffers()), buffers)
    torch.testing.assert_close(given, of_graph, rtol=0, atol=0)
    assert len(graph.builds) == 1


@pytest.mark.one_case
@pytest.mark.parametrize("given", [Z.conj(), Z.conj().t(), Z], ids=["conjugated", "transposed", "plain"])
def test_conjugation_by_a_bit(given: torch.Tensor) -> None:
    graph = mg.trace(lambda z: (z * 2, z.real + 1, (z * z.conj()).real.sum()))
    graph.config.backend("inductor")
    for one, other in zip(
        (given * 2, given.real + 1, (given * given.conj()).real.sum()), graph(given), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.long
def test_the_bit_may_come_and_go() -> None:
    graph = mg.trace(lambda x: x * 3)
    graph.config.backend("inductor")
    for x in (Z.imag, Z.conj().imag, Z.imag, Z.conj().imag):
        torch.testing.assert_close(x * 3, graph(x))
    assert len(graph.builds) == 2
