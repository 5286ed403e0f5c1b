"""The order of kernels: what can fail first, writes into the caller's tensors last, all else where it was."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from monograph.compat.inductor import write_order as _writes_last
from monograph.compat.inductor.checks.indices import Check
from monograph.compat.inductor.write_order import UnorderedError, _Phases


class Kernel:
    """A kernel of one op or more."""

    def __init__(self, *names: str, needs: Sequence[str] = ()) -> None:
        self._names, self.unmet_dependencies = names, [SimpleNamespace(name=name) for name in needs]
        self._parts: list[Any] = []

    def get_name(self) -> str:
        return self._names[0]

    def get_nodes(self) -> list[Any]:
        return self._parts or [self]


def together(*kernels: Kernel) -> Kernel:
    """One kernel for several."""
    made = Kernel("_".join(item.get_name() for item in kernels))
    made._parts = [op for item in kernels for op in item.get_nodes()]
    return made


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the phases of kernels; names tell which of them write and fail."""
    monkeypatch.setattr(
        _writes_last, "_written_outside", lambda _, op: {"w"} if op.get_name()[0] == "w" else set()
    )
    monkeypatch.setattr(
        _writes_last, "_failing", lambda ops, before: {name for name in before if name[0] == "f"}
    )
    monkeypatch.setattr(
        _writes_last, "_flag_among", lambda written: "w_flag" if "w_flag" in written else None
    )

    def made(kernels: Sequence[Kernel]) -> _Phases:
        names = (op.get_name() for kernel in kernels for op in kernel.get_nodes())
        buffers = {name: SimpleNamespace(defining_op_name=lambda name=name: name) for name in names}
        return _Phases(SimpleNamespace(name_to_buf=buffers), kernels, True)

    return made


def test_writes_move_behind_what_fails_with_the_flag_before_them(phases):
    w_count, mean = Kernel("w_count"), Kernel("mean")
    w_mean, use = Kernel("w_mean", needs=["mean"]), Kernel("use", needs=["w_count"])
    fails, w_last, w_flag = Kernel("fails", needs=["mean"]), Kernel("w_last"), Kernel("w_flag")
    kernels = [w_count, mean, w_mean, use, fails, w_last, w_flag]
    ordered = phases(kernels).ordered(kernels)
    assert ordered == [mean, fails, w_flag, w_count, w_mean, use, w_last]


def test_nothing_moves_where_nothing_fails(phases):
    kernels = [Kernel("w_count"), Kernel("mean"), Kernel("w_mean", needs=["mean"])]
    assert phases(kernels).ordered(kernels) == kernels


def test_what_fails_and_what_it_needs_is_not_joined_with_writes(phases):
    mean, w_mean = Kernel("mean"), Kernel("w_mean", needs=["mean"])
    fails, plain, w_plain = (
        Kernel("fails", needs=["mean"]),
        Kernel("plain"),
        Kernel("w_plain", needs=["plain"]),
    )
    w_flag = Kernel("w_flag")
    found = phases([mean, w_mean, fails, plain, w_plain, w_flag])
    assert not found.may_join(mean, w_mean)
    assert not found.may_join(fails, w_plain)
    assert not found.may_join(w_flag, w_plain)
    assert found.may_join(mean, plain)
    assert found.may_join(plain, w_plain)


def test_a_join_is_remembered(phases):
    mean, fails = Kernel("mean"), Kernel("fails", needs=["mean"])
    plain, w_plain, w_other = Kernel("plain"), Kernel("w_plain", needs=["plain"]), Kernel("w_other")
    found = phases([mean, fails, plain, w_plain, w_other])
    found.joined(together(mean, plain))  # plain now comes before what fails
    assert not found.may_join(together(mean, plain), w_plain)
    assert found.may_join(w_plain, w_other)


def test_a_kernel_that_writes_and_fails_is_told(phases):
    both = together(Kernel("w_row"), Kernel("fails"))
    with pytest.raises(UnorderedError):
        phases([both]).ordered([both])


def test_which_checks_stand_for_others():
    whole, part = Check("load(words) in 7", of_all=True), Check("load(words) in 7")
    assert whole.covers(part)
    assert not part.covers(whole)
    assert not whole.covers(Check("load(words) in 8"))
    assert not Check(of_all=True).covers(Check())
    assert whole.covers(Check("load(words) in 7", takes_negative=True))
    assert not Check("load(words) in 7", takes_negative=True, of_all=True).covers(part)


def test_a_buffer_is_filled_when_it_is_needed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_writes_last, "_fills", lambda node: node.get_name().startswith("zeros"))
    monkeypatch.setattr(Kernel, "get_buffer_names", lambda kernel: [kernel.get_name()], raising=False)
    zeros, more, last = Kernel("zeros"), Kernel("zeros_more"), Kernel("zeros_for_nobody")
    forward, backward = Kernel("forward"), Kernel("backward", needs=["forward"])
    add, again = Kernel("add", needs=["backward", "zeros", "zeros_more"]), Kernel("again", needs=["zeros"])
    order = _writes_last._when_needed([zeros, last, forward, more, backward, add, again])
    assert order == [last, forward, backward, zeros, more, add, again]
