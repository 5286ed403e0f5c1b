"""The instructions that compiled code uses are those that Inductor would find by trials, without a trial."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from monograph.compat.inductor import loading
from monograph.compat.inductor.building import processor

vectors = importlib.import_module("torch._inductor.cpu_vec_isa")


@pytest.fixture
def untold():
    """Nothing is known yet of the processor; after the test, what was known before."""
    vectors.valid_vec_isa_list.cache_clear()
    yield
    vectors.valid_vec_isa_list.cache_clear()


def test_they_are_inductors_and_none_is_tried(untold, monkeypatch):
    found = vectors.pick_vec_isa()
    vectors.valid_vec_isa_list.cache_clear()
    tried = []
    monkeypatch.setattr(vectors.VecISA, "check_build", lambda *given: tried.append(given))
    with processor.instructions_taken_as_told():
        taken = vectors.pick_vec_isa()
        assert taken
        assert isinstance(taken, type(found))
        for fact in ("bit_width", "build_macro", "build_arch_flags", "nelements", "__str__"):
            assert getattr(taken, fact)() == getattr(found, fact)(), fact
        assert hash(taken) == hash(found)
    assert not tried


@pytest.mark.parametrize("fault", ["libtorch", "environment", "flags"])
def test_where_they_cannot_be_told_inductor_tries(untold, monkeypatch, fault):
    if fault == "libtorch":
        monkeypatch.setattr(processor, "_in_libtorch", lambda name: False)
    if fault == "environment":
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    if fault == "flags":
        monkeypatch.setattr(vectors, "x86_isa_checker", list)
    theirs = vectors.valid_vec_isa_list
    with processor.instructions_taken_as_told():
        assert vectors.valid_vec_isa_list is theirs


def test_a_compiler_that_refuses_them_gets_what_inductor_finds(untold, monkeypatch):
    theirs, seen = vectors.valid_vec_isa_list, []

    def compile_once(*_args, **_options) -> str:
        seen.append(vectors.valid_vec_isa_list is theirs)
        if len(seen) == 1:
            raise OSError("unrecognized command-line option")
        return "made"

    monkeypatch.setattr(torch._inductor, "aot_compile", compile_once)
    monkeypatch.setattr(vectors, "pick_vec_isa", lambda: None)
    module = torch.fx.symbolic_trace(nn.Identity())
    assert loading._made(module, {}, (), {}, lambda *_: None) == "made"
    assert seen == [not vectors.x86_isa_checker(), True]
