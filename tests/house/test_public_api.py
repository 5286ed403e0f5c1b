"""The public names: exactly these, each with a docstring, and every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import monograph as mg

NAMES = {
    "AliasError",
    "ArtifactError",
    "BackendError",
    "Build",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "CheckpointManager",
    "DataDependentError",
    "DatasetError",
    "DefinitionError",
    "Dim",
    "DistributedError",
    "Graph",
    "GraphBoundaryError",
    "GraphModule",
    "HookError",
    "MissingBuildError",
    "MonographError",
    "NonfiniteError",
    "OptimizerError",
    "Origin",
    "PassError",
    "PlanError",
    "SignatureError",
    "TornStateError",
    "UnavailableError",
    "UnsupportedTensorError",
    "amp",
    "assert_max_builds",
    "buckets",
    "distributed",
    "replicated",
    "export_aoti",
    "export_onnx",
    "export_triton",
    "load",
    "load_onnx_weights",
    "probe",
    "save",
    "spec",
    "summary",
    "testing",
    "trace",
    "train_graph",
}
MEMBERS = {
    "add_ema",
    "add_optimizer",
    "backend",
    "build",
    "builds",
    "compile",
    "config",
    "debug",
    "diff",
    "draw",
    "eager",
    "ema_weights",
    "explain",
    "find_nonfinite",
    "is_compiled",
    "load_state_dict",
    "many",
    "max_batch",
    "memory",
    "name",
    "plan",
    "probes",
    "profile",
    "prove_resume",
    "register_state",
    "replay",
    "set_grad_scaler",
    "show",
    "state_dict",
    "steps",
    "summary",
    "to_html",
    "training",
    "verify",
}
MODULES = [
    info.name
    for info in pkgutil.walk_packages(mg.__path__, "monograph.")
    if not info.name.startswith(
        "monograph.integrations."
    )  # these need what `make test-integrations` installs
]


def test_exactly_these_names():
    assert set(mg.__all__) == NAMES
    assert all(hasattr(mg, name) for name in NAMES)


def test_members_of_graph():
    own = [vars(kind) for kind in mg.Graph.__mro__ if kind is not object]
    assert {name for names in own for name in names if not name.startswith("_")} == MEMBERS


def test_public_objects_have_a_line_of_documentation():
    for name in NAMES:
        first = (inspect.getdoc(getattr(mg, name)) or "").partition("\n")[0]
        assert 10 < len(first) < 120, name
    for name in MEMBERS:
        assert inspect.getdoc(getattr(mg.Graph, name)), name


@pytest.mark.every_case
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, extraglobs={"torch": torch, "nn": nn, "mg": mg})
    assert results.failed == 0


def test_errors_form_one_tree():
    errors = [getattr(mg, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, mg.MonographError) for error in errors)
    error = mg.CaptureError("it failed", where=mg.Origin("train.py", 41, "model.fc"), hint="do this")
    assert 'at "train.py", line 41' in str(error)
    assert "in module model.fc" in str(error)
    assert "hint: do this" in str(error)


def test_import_is_quiet_and_light():
    code = (
        "import sys, time, torch; start = time.perf_counter(); import monograph; "
        "print('torch._dynamo' in sys.modules, 'sympy.printing.str' in sys.modules, 'typer' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]
    assert done.stderr == ""


@pytest.mark.long
def test_a_first_step_loads_nothing_of_torchs_compilers():
    code = (
        "import sys, torch, monograph as mg; model = torch.nn.Linear(2, 2); "
        "optimizer = torch.optim.AdamW(model.parameters()); "
        "step = mg.train_graph(model, torch.nn.MSELoss(), optimizer); step.config.backend('aten'); before = set(sys.modules); "
        "step(torch.ones(2, 2), torch.ones(2, 2)); print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = ("torch.export", "torch._functorch.aot_autograd", "torch._inductor.scheduler", "networkx")
    assert not [name for name in done.stdout.split() if name.startswith(heavy)]


@pytest.mark.long
def test_a_program_can_be_read_where_no_graph_was_imported():
    names = "import torch; print(*sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith('monograph::')))"
    found = [
        subprocess.run(
            [sys.executable, "-c", f"import {part}; {names}"], capture_output=True, text=True, check=True
        )
        for part in ("monograph.graph", "monograph.artifact.programs.serialize")
    ]
    assert len(found[0].stdout.split()) > 20
    assert found[0].stdout == found[1].stdout


@pytest.mark.long
def test_import_loads_nothing_that_training_does_not_need():
    code = (
        "import sys, monograph; parts = {name.split('.')[1] for name in sys.modules if name.startswith('monograph.')}; "
        "print(*sorted(parts & {'cli', 'flow', 'serving', 'testing', 'capture', 'internals', 'passes'})); monograph.testing.align; "
        "monograph.Graph"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
