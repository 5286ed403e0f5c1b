"""What is built on the public names, and the benchmarks, import few modules of the inside: these."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Set

import pytest

from tests.house.test_layers import (
    BENCHMARKS,
    PACKAGE,
    WHOLE,
    own_imports,
    part_of,
    private_torch_breaches,
    relative_breaches,
)

INSIDE_BENCHMARKS = {  # the modules that they import besides `monograph` itself
    "monograph.cli.steps",
    "monograph.compat.autograd",
    "monograph.inspect.roofline",
    "monograph.internals.internals",
    "monograph.ir.meta",
    "monograph.kernels.candidates",
    "monograph.kernels.compile",
    "monograph.kernels.select",
    "monograph.kernels.trials",
    "monograph.runtime.one_piece",
}
INSIDE: Mapping[str, Set[str]] = {  # the modules that parts built on public names import besides them
    "cli": {
        "monograph.artifact.artifact",
        "monograph.artifact.description",
        "monograph.compat",
        "monograph.compat.inductor.directories",
        "monograph.compat.inductor.disk_cache",
        "monograph.compat.inductor.loading",
        "monograph.inspect.replay_prompt",
        "monograph.internals.internals",
        "monograph.ir.call.nested",
        "monograph.ir.call.reason",
        "monograph.ir.meta",
        "monograph.numerics.judge",
        "monograph.resume.factory",
        "monograph.resume.proof",
        "monograph.serving.limits",
        "monograph.serving.models",
        "monograph.user_code.files",
        "monograph.user_code.tracebacks",
    },
    "flow": {
        "monograph.compat.distributed.tensors",
        "monograph.distributed.placements",
        "monograph.distributed.sbp",
        "monograph.block",
        "monograph.checkpoint.files",
        "monograph.checkpoint.load",
        "monograph.checkpoint.save",
        "monograph.compat.optimizers",
        "monograph.config",
        "monograph.internals.internals",
        "monograph.ir.call.tree",
        "monograph.schedulers.by_formula",
        "monograph.schedulers.composed",
        "monograph.schedulers.of_torch",
        "monograph.schedulers.scheduler",
        "monograph.schedulers.stepping",
        "monograph.shortcuts",
        "monograph.state.find",
        "monograph.state_dict.loading",
        "monograph.state_dict.parts",
    },
    "integrations": {
        "monograph.config",
        "monograph.internals.internals",
        "monograph.numerics.verify",
    },
    "serving": {
        "monograph.artifact.artifact",
        "monograph.artifact.callable_programs",
        "monograph.artifact.schema.signatures",
        "monograph.artifact.schema.tree",
        "monograph.export.batch_independence",
        "monograph.export.triton",
        "monograph.ir.call.tree",
        "monograph.ir.meta",
        "monograph.settings",
    },
    "testing": {
        "monograph.capture.guards.sources.closures",
        "monograph.compat.ops",
        "monograph.compat.tensors",
        "monograph.errors",
        "monograph.ir.call.numbers",
        "monograph.ir.call.tree",
        "monograph.numerics.judge",
        "monograph.user_code.lines",
    },
}


def test_benchmarks_import_public_names_and_what_they_measure() -> None:
    trees = {path: ast.parse(path.read_text()) for path in BENCHMARKS.rglob("*.py")}
    for path, tree in trees.items():
        assert relative_breaches(path.name, tree) + private_torch_breaches(path.name, tree) == []
    assert inside_modules(trees.values()) == INSIDE_BENCHMARKS


@pytest.mark.parametrize("part", WHOLE)
def test_what_is_built_on_public_names_imports_little_else(part: str) -> None:
    found = inside_modules(ast.parse(path.read_text()) for path in (PACKAGE / part).rglob("*.py"))
    assert {name for name in found if part_of(name) != part} == INSIDE[part]


def test_graphs_get_their_inputs_by_name() -> None:
    """`Graph.placeholder` writes names in its own way: `named_input` keeps them."""
    assert [path.name for path in PACKAGE.rglob("*.py") if ".placeholder(" in path.read_text()] == []


def inside_modules(trees: Iterable[ast.Module]) -> set[str]:
    """The modules of the package that are imported besides its public names."""
    targets = {
        item.target for tree in trees for item in own_imports(tree) if part_of(item.target) != "monograph"
    }
    return {target.rpartition(".")[0] for target in targets}
