"""Monograph: a PyTorch training step as one static graph."""

import importlib
from typing import TYPE_CHECKING, Any

from monograph.state.collector import rare_collections

with rare_collections():
    from monograph import amp, distributed
    from monograph.block import GraphModule
    from monograph.errors import (
        AliasError,
        ArtifactError,
        BackendError,
        CaptureError,
        CheckpointError,
        ConfigError,
        DataDependentError,
        DatasetError,
        DefinitionError,
        DistributedError,
        GraphBoundaryError,
        HookError,
        MissingBuildError,
        MonographError,
        NonfiniteError,
        OptimizerError,
        PassError,
        PlanError,
        SignatureError,
        TornStateError,
        UnavailableError,
        UnsupportedTensorError,
    )
    from monograph.ir.call.dims import Dim
    from monograph.ir.call.signature import replicated, spec
    from monograph.ir.probes import probe
    from monograph.padding.declaration import buckets
    from monograph.renamed import find_renamed_modules
    from monograph.user_code.lines import Origin

if TYPE_CHECKING:
    from monograph import testing
    from monograph.artifact.load import load
    from monograph.artifact.save import save
    from monograph.checkpoint.steps.manager import CheckpointManager
    from monograph.compiler import Build
    from monograph.export.onnx import load_onnx_weights
    from monograph.export.write import export_aoti, export_onnx, export_triton
    from monograph.graph import Graph
    from monograph.internals.build_limits import assert_max_builds
    from monograph.shortcuts import summary, trace, train_graph

__version__ = "0.1.0"

__all__ = [
    "AliasError",
    "ArtifactError",
    "BackendError",
    "Build",
    "CaptureError",
    "CheckpointError",
    "CheckpointManager",
    "ConfigError",
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
    "export_aoti",
    "export_onnx",
    "export_triton",
    "load",
    "load_onnx_weights",
    "probe",
    "replicated",
    "save",
    "spec",
    "summary",
    "testing",
    "trace",
    "train_graph",
]


find_renamed_modules()


def __getattr__(name: str) -> Any:
    """What not every script needs is imported when it is asked for: a graph with its compiler is most of the package."""
    places = {
        "Build": "compiler",
        "CheckpointManager": "checkpoint.steps.manager",
        "Graph": "graph",
        "assert_max_builds": "internals.build_limits",
        "export_aoti": "export.write",
        "export_onnx": "export.write",
        "export_triton": "export.write",
        "load": "artifact.load",
        "load_onnx_weights": "export.onnx",
        "save": "artifact.save",
        "summary": "shortcuts",
        "trace": "shortcuts",
        "train_graph": "shortcuts",
    }
    with rare_collections():
        if name == "testing":
            return importlib.import_module("monograph.testing")
        if name in places:
            found = globals()[name] = getattr(importlib.import_module(f"monograph.{places[name]}"), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
