"""`nn.Graph` with OneFlow's spelling: a Monograph Graph, its config, and the graph's view of a module."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import monograph as mg
from monograph import CheckpointError, DefinitionError
from monograph.block import Block, unwrap
from monograph.config import GraphConfig as OwnConfig
from monograph.flow.names import forwarding
from monograph.flow.refusals import refused
from monograph.flow.state import from_oneflow, is_oneflow, to_oneflow
from monograph.flow.tensors.shared import on_all_ranks
from monograph.flow.tensors.shared import placement as Placement
from monograph.flow.tensors.world import size
from monograph.internals.internals import internals_of
from monograph.ir.call.tree import flatten, unflatten
from monograph.schedulers.stepping import follow_graph
from monograph.shortcuts import traced
from monograph.state_dict.loading import LeftOut
from monograph.state_dict.parts import load_state, read_state

__getattr__ = forwarding("nn.graph", None)
Init = TypeVar("Init", bound=Callable[..., None])


class GraphModule(mg.GraphModule):
    """The graph's view of a module: `self.model.to(GraphModule)`. In one process its options change no numbers."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name, module)
        self._placement: Placement | None = None

    type = "MODULE"

    @property
    def name_prefix(self) -> str:
        """The path of the module that holds this one, with a dot after."""
        return self.name[: self.name.rfind(".") + 1]

    def set_stage(self, stage_id: int | None = None, placement: Placement | None = None) -> None:
        """Say to which stage of a pipeline the module belongs. Several processes run them side by side, one runs them in a row."""
        if placement is not None and not isinstance(placement, mg.distributed.placement):
            raise DefinitionError(
                f"set_stage() got a {_kind(placement)} as placement", hint='flow.placement("cpu", ranks=[0])'
            )
        super().set_stage(stage_id, placement)
        self._placement = placement

    @property
    def stage_id(self) -> int | None:
        """The stage; None if it was not set."""
        return super().stage_id

    @stage_id.setter
    def stage_id(self, value: int | None) -> None:
        self.set_stage(value, self._placement)

    @property
    def stage_placement(self) -> Placement | None:
        """The devices of the stage; None if they were not set."""
        return self._placement

    def __getattr__(self, name: str) -> Any:
        raise _missing("GraphModule", f"nn.graph.GraphModule.{name}", name)

    def __repr__(self) -> str:
        options = {
            "stage_id": self.stage_id,
            "activation_checkpointing": self.activation_checkpointing or None,
        }
        shown = "".join(f"{key}={value}, " for key, value in options.items() if value is not None)
        return f"(GraphModule:{self.name}({shown}))"


class OneFlowBlock(Block):
    """A block whose `modules()`, `children()` and their like give blocks, as OneFlow's scripts expect."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in ("config", "origin"):
                error.add_note(
                    "a module's options are at .to(GraphModule), the module itself at .to(nn.Module)"
                )
            raise

    def children(self) -> Iterator[Any]:
        """The blocks of the modules directly inside."""
        return (block for _, block in self.named_children())

    def named_children(self) -> Iterator[tuple[str, Any]]:
        """The blocks of the modules directly inside, with their names."""
        return ((name, self._block_child(name, child)) for name, child in unwrap(self).named_children())

    def modules(self) -> Iterator[Any]:
        """The blocks of all modules, this one first."""
        return (block for _, block in self.named_modules())

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """The blocks of all modules with their paths, this one first."""
        for path, _ in unwrap(self).named_modules(memo, "", remove_duplicate):
            block: Block = self
            for name in path.split(".") if path else ():
                block = block._block_child(name, unwrap(block).get_submodule(name))
            yield ".".join(part for part in (prefix, path) if part), block


class GraphConfig(OwnConfig):
    """`graph.config`: Monograph's knobs, and those of OneFlow's that have none among them."""

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.float16) -> None:
        """Run build() under autocast, in float16 unless it says otherwise."""
        super().enable_amp(mode, dtype=dtype)

    def enable_zero(
        self, mode: bool = True, *, stage: int = 2, shard_min_size: int = 1024, shard_restore_level: int = 1
    ) -> None:
        """Shard the optimizer's state over the processes, with `stage` 2 gradients too, with 3 parameters too.

        In one process nothing is shared. What modules see in a step is whole, which is what `shard_restore_level` is about.
        """
        if stage not in (1, 2, 3) or shard_min_size <= 0 or shard_restore_level not in (0, 1, 2):
            raise DefinitionError(
                f"enable_zero(stage={stage}, shard_min_size={shard_min_size}, shard_restore_level={shard_restore_level})",
                hint="stage is 1, 2 or 3, shard_min_size greater than 0, shard_restore_level 0, 1 or 2",
            )
        if size() > 1:
            super().enable_zero(mode, stage=stage, shard_min_size=shard_min_size)
        elif mode:
            _no_effect("enable_zero", "there is one process, and nothing to share")

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """One call is a mini-batch of `value` equal micro-batches, split on dimension 0, and one step of the optimizer.

        Scalar results get the shape `(value,)`; others are joined on dimension 0, as in OneFlow. `mg.replicated(x)`
        passes an argument whole to each micro-batch.
        """
        super().set_gradient_accumulation_steps(value)

    def set_outputs_buffer_size(self, value: int = 2) -> None:
        """How many calls OneFlow lets run ahead. Here each call returns tensors of its own."""
        if type(value) is not int or value < 1:
            raise DefinitionError(f"set_outputs_buffer_size({value!r})", hint="pass a whole number from 1 on")

    def enable_multi_tensor_update(self, mode: bool = True) -> None:
        """The same as `allow_fuse_model_update_ops`."""
        self.allow_fuse_model_update_ops(mode)

    def enable_fused_model_update_cast(self, mode: bool = True) -> None:
        """The same as `allow_fuse_cast_scale`."""
        self.allow_fuse_cast_scale(mode)

    def enable_straighten_algorithm(self, mode: str = "MemoryFirst") -> None:
        """Order ops for memory or for time."""
        if mode in ("OverlapCpuGpu", "DelayShortGpu"):
            _no_effect("enable_straighten_algorithm", "ops are ordered for memory or for time")
        else:
            super().enable_straighten_algorithm(mode)

    def enable_choose_best_memory_allocation(self, mode: bool = True) -> None:
        """Try several plans of memory."""
        if mode:
            _no_effect("enable_choose_best_memory_allocation", "there is one plan of memory")

    def enable_auto_memory(self, mode: str = "AdaptiveMemory") -> None:
        """Trade time for memory."""
        known = ("Disable", "SlightMemoryDown", "ModerateMemoryDown", "HeavyMemoryDown", "AdaptiveMemory")
        if mode not in known:
            raise DefinitionError(f"enable_auto_memory({mode!r})", hint=f"choose one of {', '.join(known)}")
        if mode != "Disable":
            _no_effect("enable_auto_memory", "there is one plan of memory")

    def __getattr__(self, name: str) -> Any:
        raise _missing("GraphConfig", f"nn.graph.GraphConfig.{name}", name)


class Graph(mg.Graph, block=OneFlowBlock):
    """`oneflow.nn.Graph`: a training or inference step as one static graph. Subclass it and write `build`.

    Everything that a Monograph Graph has is here too: `compile`, `eager`, `verify`, `profile`, …

    >>> class Double(Graph):
    ...     def build(self, x):
    ...         return x * 2
    >>> Double()(torch.ones(2))
    tensor([2., 2.])
    """

    def __init__(
        self,
        *,
        enable_get_runtime_state_dict: bool = False,
        debug_v_level: int = -1,
        debug_ranks: int | Sequence[int] | None = None,
        debug_max_py_stack_depth: int = 2,
        debug_only_user_py_stack: bool = True,
        debug_op_repr_with_py_stack: bool = False,
    ) -> None:
        super().__init__()
        internals_of(self).registry.config = GraphConfig()
        if debug_v_level >= 0:
            self.debug(
                debug_v_level,
                ranks=debug_ranks,
                max_py_stack_depth=debug_max_py_stack_depth,
                only_user_py_stack=debug_only_user_py_stack,
                op_repr_with_py_stack=debug_op_repr_with_py_stack,
            )

    def add_optimizer(  # type: ignore[override]  # it returns nothing, as OneFlow's
        self,
        optim: Optimizer,
        *,
        lr_sch: LRScheduler | None = None,
        lr_scheduler: LRScheduler | None = None,
        is_sparse: bool = False,
        manual: bool = False,
    ) -> None:
        """Let the graph own an optimizer; its update is part of the step. `lr_sch` steps once per call."""
        if is_sparse:
            raise DefinitionError(
                "add_optimizer(is_sparse=True): updates of single rows are not here",
                hint="leave is_sparse out: gradients of embeddings are dense, and the numbers are the same; "
                "torch.nn.Embedding(..., sparse=True) with SGD or Adagrad has sparse ones",
            )
        super().add_optimizer(optim, lr_sch=lr_sch, lr_scheduler=lr_scheduler, manual=manual)
        # a step() of the script itself is ignored, as in OneFlow
        follow_graph(lr_scheduler if lr_sch is None else lr_sch)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. What it returns has no gradient history, as OneFlow's, and is never overwritten."""
        leaves: list[Any] = []
        form = flatten(super().__call__(*args, **kwargs), leaves)
        results = {id(leaf): _detached(leaf) for leaf in leaves}
        return unflatten(form, iter([results[id(leaf)] for leaf in leaves]))

    def set_grad_scaler(
        self, grad_scaler: torch.amp.GradScaler | mg.amp.StaticGradScaler | None = None
    ) -> None:
        """Scale the loss of every `backward()`, and unscale the gradients. None takes the scaler away."""
        super().set_grad_scaler(grad_scaler)

    def state_dict(
        self, destination: dict[str, Any] | None = None, *, python_random: bool = False
    ) -> dict[str, Any]:
        """Everything that decides how training goes on, in OneFlow's layout.

        Modules stand under the names of their attributes; optimizer state under `<parameter>-<entry>`, such as
        `model.weight-momentum`; the number of steps under `System-Train-TrainStep`, an int64 tensor of shape (1,).
        Param groups, schedulers, the scaler and random states follow under the names that a Monograph Graph has.
        """
        found = to_oneflow(super().state_dict(python_random=python_random), internals_of(self).owned())
        if destination is None:
            return found
        destination.update(found)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LeftOut:
        """Take over a state at any time: one of this class, of a Monograph Graph, or of OneFlow's."""
        inside, missing = internals_of(self), list[str]()
        state_dict = on_all_ranks(state_dict)
        if is_oneflow(state_dict):
            with inside.store.lock:
                state_dict, missing = from_oneflow(state_dict, read_state(inside), inside.owned())
        if missing and strict:
            raise CheckpointError(
                f"the state does not fit this graph, and nothing was loaded\n  missing: {', '.join(missing)}",
                hint="load all of the state that was saved; strict=False lets the optimizer begin anew there",
            )
        left = load_state(inside, state_dict, strict=strict)
        return LeftOut([*missing, *left.missing_keys], left.unexpected_keys)

    def enable_shared(self, mode: bool = True) -> None:
        """Nothing to do: graphs that hold the same modules share their parameters."""

    def share_from(self, shared_graph: mg.Graph) -> None:
        """Check that the other graph holds the same modules, so that the parameters are shared already."""
        mine, others = (internals_of(graph).registry.modules() for graph in (self, shared_graph))
        if different := [name for name, module in mine.items() if others.get(name) is not module]:
            raise DefinitionError(
                f"{self.name} and {shared_graph.name} hold different modules as {', '.join(different)}",
                hint="give both the same module, or call one graph with inputs of other shapes: it makes a build for each",
            )

    @staticmethod
    def trace(func: Callable[..., Any]) -> mg.Graph:
        """A graph from a function, named `<function>_graph_<n>`."""
        return traced(func, Graph)

    @staticmethod
    def with_dynamic_input_shape(*, size: int = 10, enable_shared: bool = True) -> Callable[[Init], Init]:
        """A decorator for `__init__`. A graph makes a build for each shape anyway, over the same parameters."""
        return lambda init: init

    def _compile(self, *args: Any, **kwargs: Any) -> None:
        """The same as `compile`."""
        self.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if (error := refused(f"nn.Graph.{name}", DefinitionError)) is not None:
            raise error
        return super().__getattr__(name)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None else leaf


def _missing(kind: str, path: str, name: str) -> AttributeError:
    return refused(path, DefinitionError) or AttributeError(f"{kind!r} object has no attribute {name!r}")


def _no_effect(what: str, why: str) -> None:
    warnings.warn(f"{what} has no effect: {why}", stacklevel=3)


def _kind(item: object) -> str:
    return type(item).__name__
