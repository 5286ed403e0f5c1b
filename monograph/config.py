"""The setters of a Graph's `config`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from monograph.compat.distributed.pipelining import SCHEDULES
from monograph.distributed.columns import check_mesh
from monograph.errors import ConfigError, DefinitionError, NamesNear, shown
from monograph.ir.text import bytes_in
from monograph.padding.declaration import Buckets, checked
from monograph.padding.tally import Padding
from monograph.passes.table import PASS_NAMES, PASSES, Runs
from monograph.settings import (
    BACKENDS,
    KEPT,
    STRAIGHTENED,
    DataParallel,
    DynamicSize,
    MemoryBudget,
    Settings,
    Zero,
    is_compiled,
    pass_name,
)

_SHARE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)x", re.ASCII)  # of the bytes that a step holds by itself


class GraphConfig(NamesNear):
    """The setters of a Graph's `config`; each returns nothing and takes effect with the next call."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.training = False
        self.padding = Padding()

    def __setattr__(self, name: str, value: Any) -> None:
        if callable(getattr(type(self), name, None)):
            raise DefinitionError(
                f"config.{name} is a method: it cannot be set", hint=f"call it: config.{name}({shown(value)})"
            )
        super().__setattr__(name, value)

    def backend(self, name: str, *, background: bool = False, swap_at: int | None = None) -> None:
        """Choose what runs the program: "auto", "aten" (op by op), "exact" (compiled with eager's bits) or "inductor".

        With `background` another process compiles: steps run on "aten" until it is done, or up to the step `swap_at`, the
        first one by compiled code. Raises ConfigError for a backend that there is not, and a step that is none or has passed.
        """
        if name not in BACKENDS:
            raise ConfigError(f"unknown backend {shown(name)}", hint=f"choose one of {', '.join(BACKENDS)}")
        if background and not is_compiled(name):
            raise ConfigError(
                f"backend({shown(name)}, background=True): there is nothing to wait for",
                hint='"auto" compiles beside the steps by itself',
            )
        if swap_at is not None and (type(swap_at) is not int or swap_at < 0 or not background):
            raise ConfigError(
                f"swap_at={shown(swap_at)}: it takes the number of a step, with background=True",
                hint='config.backend("inductor", background=True, swap_at=1000)',
            )
        self.settings = replace(self.settings, backend=name, background=background, swap_at=swap_at)

    def keep_gradients(self, mode: bool = True) -> None:
        """Leave eager's gradients in `p.grad` after a step; the next one adds to those that nothing clears."""
        self.settings = replace(self.settings, keep_gradients=_switch(mode))

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Run build() under autocast; `backward()` and the optimizers are outside of it."""
        if not isinstance(mode, bool):
            raise DefinitionError(
                f"enable_amp({shown(mode)}): the first argument says on or off", hint="pass dtype=..."
            )
        if dtype not in (torch.float16, torch.bfloat16):
            raise DefinitionError(
                f"enable_amp(dtype={dtype}): autocast computes in half precision",
                hint="choose torch.bfloat16, or torch.float16 with a gradient scaler: graph.set_grad_scaler(...)",
            )
        self.settings = replace(self.settings, amp=dtype if mode else None)

    def set_gradient_accumulation_steps(self, n: int) -> None:
        """One call is a mini-batch of `n` equal micro-batches, split on dimension 0, and one step of the optimizer.

        backward() sees the loss divided by `n`. Scalar results get the shape `(n,)`, undivided; others are joined on
        dimension 0. `mg.replicated(x)` passes an argument whole to each micro-batch.
        """
        if type(n) is not int or n < 1:
            raise DefinitionError(
                f"set_gradient_accumulation_steps({shown(n)}): a number of micro-batches is needed",
                hint="pass a whole number from 1 on; 1 means no accumulation",
            )
        self.settings = replace(self.settings, accumulation_steps=n)

    def enable_data_parallel(self, mesh: Any = None, *, mode: bool = True) -> None:
        """Average gradients over the processes of `mesh`, a DeviceMesh of one dimension, or over all: each call is one's own batch.

        As DistributedDataParallel does it: parameters and buffers are those of the first process when the graph is built, and
        buffers before each step. Where modules have stages the mesh has two dimensions: the one that is named "pp" has the stages of
        a copy of the model, which take the same batch, the other one has the copies. Raises DistributedError when the graph is built in
        a single process.
        """
        check_mesh(mesh)
        on = _switch(mode)
        self.settings = replace(self.settings, data_parallel=DataParallel(mesh) if on else None)

    def enable_zero(self, mode: bool = True, *, stage: int = 2, shard_min_size: int = 1024) -> None:
        """Let each process keep a part of the state of optimizers (1), of gradients too (2), and of parameters (3).

        As enable_data_parallel(), each call is one's own batch. At stages 1 and 2 parameters stay whole, and each process updates
        its part of them; at stage 3 they are DTensors from the first build on, and modules see them whole while they run. What has
        fewer than `shard_min_size` elements stays whole, and so do parameters and state of an optimizer whose step does not run on
        DTensors: explain() says which. The processes are those of enable_data_parallel(mesh), or all. Raises DistributedError when
        the graph is built in a single process.
        """
        if stage not in (1, 2, 3):
            raise ConfigError(
                f"enable_zero(stage={shown(stage)}): there are stages 1, 2 and 3", hint="enable_zero(stage=2)"
            )
        if type(shard_min_size) is not int or shard_min_size < 0:
            raise ConfigError(
                f"enable_zero(shard_min_size={shown(shard_min_size)}): a number of elements is needed",
                hint="pass an int from 0 on",
            )
        self.settings = replace(self.settings, zero=Zero(stage, shard_min_size) if _switch(mode) else None)

    def set_pipeline_schedule(self, name: str) -> None:
        """Choose the order in which several processes take micro-batches through stages, by the name that torch has for it.

        Modules are in stages by `block.to(mg.GraphModule).set_stage(...)`; in one process that changes nothing. "GPipe" and "1F1B"
        take one stage for each process, "Interleaved1F1B", "LoopedBFS" and "InterleavedZeroBubble" several, "ZBVZeroBubble" and
        "DualPipeV" two, the first and the last stage on the first process. Raises ConfigError for another name.

        >>> config = GraphConfig()
        >>> config.set_pipeline_schedule("GPipe")
        >>> config.settings.pipeline_schedule
        'GPipe'
        """
        if name not in SCHEDULES:
            raise ConfigError(f"set_pipeline_schedule({shown(name)})", hint=f"one of {', '.join(SCHEDULES)}")
        self.settings = replace(self.settings, pipeline_schedule=name)

    def enable_pass(self, name: str, mode: bool = True) -> None:
        """Switch a pass on or off, whatever the backend does by itself; docs/passes.md lists them."""
        rows = {row.name: row for row in PASSES if row.runs is not Runs.ALWAYS}
        if name not in rows:
            raise DefinitionError(
                f"there is no pass {shown(name)} that can be switched", hint=f"one of {', '.join(rows)}"
            )
        switched = dict(self.settings.passes) | {name: _switch(mode)}
        if rows[name].runs is Runs.ASKED and not mode:
            del switched[name]  # it is off by itself
        self.settings = replace(self.settings, passes=tuple(sorted(switched.items())))

    def allow_fuse_model_update_ops(self, mode: bool = True) -> None:
        """Write the optimizer's arithmetic for all parameters as few ops on lists of tensors: pass `model_update`."""
        self.enable_pass("model_update", mode)

    def allow_fuse_add_to_output(self, mode: bool = True) -> None:
        """Let matrix products add to what is there, so that sums of gradients take one op: pass `add_to_output`."""
        self.enable_pass("add_to_output", mode)

    def allow_fuse_cast_scale(self, mode: bool = True) -> None:
        """Unscale each gradient next to its cast instead of all in one op: pass `cast_scale`."""
        self.enable_pass("cast_scale", mode)

    def enable_cudnn_conv_heuristic_search_algo(self, mode: bool = True) -> None:
        """Let cuDNN time its convolution algorithms on the shapes of the step and take the fastest, on CUDA devices.

        That is `torch.backends.cudnn.benchmark`, switched while a step of this graph runs.
        """
        self.settings = replace(self.settings, conv_heuristic_search=_switch(mode))

    def enable_kernel_selection(self, mode: bool = True) -> None:
        """Time other kernels for matrix products and convolutions when compiling, and take the fastest.

        On for compiled backends. What was measured is cached on disk. On `aten`, where it is off unless asked for,
        steps then equal those of eager mode up to rounding.
        """
        self.settings = replace(self.settings, kernel_selection=_switch(mode))

    def set_memory_budget(self, budget: int | str | None) -> None:
        """Limit the step memory: the bytes above parameters, optimizer state and arguments; None removes the limit.

        It is a number of bytes, or a text such as "2 GiB" or "500 MB"; "0.5x" is half of the step memory without a limit.
        Backward recomputes what does not fit, with the least predicted time; on `aten` with the same bits. `inductor` compiles
        the same ops in another order: if that order holds more, the step runs on `aten`, with a warning. The next call makes a
        build. It raises PlanError, with the least possible number of bytes, if the budget is impossible. Raises ConfigError for
        a value that is neither a number of bytes nor a share.

        >>> config = GraphConfig()
        >>> config.set_memory_budget("0.5x")
        >>> config.settings.memory_budget
        '0.5x'
        """
        self.settings = replace(self.settings, memory_budget=None if budget is None else _budget(budget))

    def enable_straighten_algorithm(self, mode: str = "MemoryFirst") -> None:
        """Order ops for memory, which is how it is by itself, or for time.

        "MemoryFirst": each parameter is updated as soon as its gradient is complete, and backward computes again what costs next to
        nothing. "SpeedFirst" and "Disable": updates run last, and nothing is computed again. Raises ConfigError for other modes.
        """
        if mode not in STRAIGHTENED:
            raise ConfigError(
                f"enable_straighten_algorithm({shown(mode)})", hint=f"choose one of {', '.join(STRAIGHTENED)}"
            )
        self.settings = replace(self.settings, straighten=mode)

    def enable_compress_memory(self, mode: bool = True) -> None:
        """Compute again in backward what makes the peak of memory as small as a third more time per step allows."""
        self.settings = replace(self.settings, compress_memory=_switch(mode))

    def detect_nonfinite(self, mode: bool = True) -> None:
        """Raise NonfiniteError in a step that makes a NaN or an infinity, with the first op to blame; keep the old state.

        The step looks at a flag before it takes over new state, which costs time: `graph.find_nonfinite()` costs none.
        """
        self.enable_pass("gate_nonfinite", mode)

    def strict(self, mode: bool = True) -> None:
        """Raise CaptureError for what a capture cannot guard, where it otherwise warns: the clock, iterators, files."""
        self.settings = replace(self.settings, strict=_switch(mode))

    def add_pass(self, function: Callable[[Any], Any], after: str | None = None) -> None:
        """Run a pass of your own, a function from Program to Program, after the pass named `after`, or as the last.

        It belongs to a build as the other settings do: with another function the next call makes a new build.
        """
        if not callable(function) or not isinstance(function, Hashable):
            raise DefinitionError(
                f"add_pass({shown(function)}): a pass is a function from Program to Program, or an object that can be "
                "called and hashed",
                hint="define it by def, or as a frozen dataclass; docs/passes.md shows how",
            )
        added = [pass_name(item) for item, _ in self.settings.added_passes]
        if (name := pass_name(function)) in (*PASS_NAMES, *added):
            raise DefinitionError(f"there is a pass {name!r} already", hint="give the function another name")
        if after is not None and after not in (*PASS_NAMES, *added):
            raise DefinitionError(
                f"there is no pass {shown(after)}", hint=f"passes: {', '.join((*PASS_NAMES, *added))}"
            )
        self.settings = replace(self.settings, added_passes=(*self.settings.added_passes, (function, after)))

    def dynamic(
        self, argument: str | bool, dim: int | None = None, min: int | None = None, max: int | None = None
    ) -> None:
        """Let a size of an argument vary from the first build on, or with False none by itself.

        By itself a size varies from its second value on. `argument` is a name of build()'s, or a path such as
        `batch['input_ids']`; sizes of different arguments that are equal in the first call are one. A size outside of
        `min` to `max` has builds of its own. Raises ConfigError for what is no size or no range; the call that is captured
        raises CaptureError, with the line, where the step fixes a size.

        >>> config = GraphConfig()
        >>> config.dynamic("input_ids", 1, max=512)
        >>> config.settings.sizes
        (input_ids.size(1), max=512,)
        """
        if isinstance(argument, bool) and dim is min is max is None:
            self.settings = replace(self.settings, dynamic=argument)
            return
        if not isinstance(argument, str) or type(dim) is not int:
            raise ConfigError(
                f"dynamic({shown(argument)}, {shown(dim)}): the name of an argument and a dimension are needed",
                hint='config.dynamic("x", 0), or config.dynamic(False) for no size that varies',
            )
        limits = [item for item in (min, max) if item is not None]
        if any(type(item) is not int or item < 1 for item in limits) or limits != sorted(limits):
            raise ConfigError(
                f"dynamic({shown(argument)}, {dim}, min={shown(min)}, max={shown(max)}): no sizes are in this range",
                hint="whole numbers from 1 on, min <= max",
            )
        size = DynamicSize(argument, dim, min, max)
        for known in self.settings.sizes:
            if (known.argument, known.dim) == (argument, dim) and known != size:
                raise ConfigError(
                    f"dynamic({shown(argument)}, {dim}) has the range of `{known!r}` already",
                    hint="declare each size once",
                )
        if size not in self.settings.sizes:
            self.settings = replace(self.settings, sizes=(*self.settings.sizes, size))

    def max_builds(self, n: int | None, *, keep: str | None = None) -> None:
        """Raise instead of compiling more than `n` builds; None removes the limit.

        With `keep="recent"` a further build takes the place of the one that was not used for the longest time. That one is
        made again when it is needed.
        """
        if n is not None and (type(n) is not int or n < 1):
            raise DefinitionError(
                f"max_builds({shown(n)}): a number of builds from 1 on is needed",
                hint="pass None to remove the limit",
            )
        if keep is not None and keep not in KEPT:
            raise ConfigError(
                f"max_builds({shown(n)}, keep={shown(keep)}): which builds are to stay?",
                hint='keep="recent" drops the least recently used; without keep, one build too many is an error',
            )
        self.settings = replace(self.settings, max_builds=n, keep=keep)

    def buckets(self, *buckets: Buckets | None, compare: bool = True) -> None:
        """Pad arguments to the sizes of buckets before each step, and cut its results back; None takes all buckets away.

        `mg.buckets("input_ids", dim=1, sizes=[32, 64, 128])` makes them. The first step of each bucket is compared with the one
        without padding, and a warning names a loss that sees the padding; `compare=False` goes without. Raises ConfigError.
        """
        if not buckets:
            raise ConfigError(
                "config.buckets() got no buckets",
                hint='config.buckets(mg.buckets("input_ids", dim=1, sizes=[32, 64, 128])); None takes all away',
            )
        found = () if buckets == (None,) else checked(self.settings.buckets, buckets)
        self.settings = replace(self.settings, buckets=found, compare_buckets=_switch(compare))

    def lines(self) -> list[str]:
        """What explain() says of the buckets."""
        return self.padding.lines(self.settings.buckets)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Those of earlier versions had no padding."""
        self.__dict__.update({"padding": Padding(), **state})

    def __repr__(self) -> str:
        cost = f", {self.padding.cost}" if self.settings.buckets and self.padding.cost else ""
        return f"GraphConfig(training={self.training}, {self.settings.knobs()}{cost})"


def _budget(budget: Any) -> MemoryBudget:
    nbytes = bytes_in(budget) if isinstance(budget, str) else budget
    if type(nbytes) is int and nbytes > 0:
        return MemoryBudget(nbytes)
    share = _SHARE.fullmatch(budget) if isinstance(budget, str) else None
    if share is None or not float(share[1]):
        raise ConfigError(
            f"set_memory_budget({shown(budget)}): neither a number of bytes nor a share of what the step holds",
            hint='set_memory_budget("2 GiB") or set_memory_budget(2 * 2**30), set_memory_budget("0.5x") for half',
        )
    return MemoryBudget(share=float(share[1]))


def _switch(mode: Any) -> bool:
    if not isinstance(mode, bool):
        raise DefinitionError(f"{shown(mode)} is neither on nor off", hint="pass True or False")
    return mode
