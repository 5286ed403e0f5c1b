"""Scripts of others and their ports: the same losses and the same trained tensors."""

from __future__ import annotations

import pytest

from benchmarks.ported import changed_lines, in_a_process

IN_ANOTHER_ORDER = {
    "actor_critic": 1e-3
}  # it learns from whole episodes, not from one action after the other


@pytest.mark.one_case
@pytest.mark.parametrize(
    "name", ["forward_forward", "actor_critic", "nanogpt"]
)  # all of them: python -m benchmarks.ported
def test_a_port_trains_as_the_script_does(name: str) -> None:
    eager, graph = (in_a_process(name, way, 1) for way in ("eager", "aten"))
    if name in IN_ANOTHER_ORDER:
        assert graph.losses == pytest.approx(eager.losses, rel=IN_ANOTHER_ORDER[name])
    else:
        assert (graph.losses, graph.digest) == (eager.losses, eager.digest)
    out, put = changed_lines(name)
    assert 0 < out < put + 20
