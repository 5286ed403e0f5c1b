"""Hostile arguments for every op that an artifact may hold without trust: none may end the process, or hang it.

Each call is a program of one op, read from JSON as `mg.load` reads it, and run. Tensors lie between pages that nobody
may touch (`guarded_memory.c`, built where there is a C compiler), so that what reads or writes out of bounds dies.

Run `python -m tests.stress.artifact_ops --calls 100000`; `--only NAME --first 17 --calls 1` repeats one call.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from monograph.artifact import unpack as unpacking
from monograph.artifact.bounds.describe import _without_data, check_bytes
from monograph.artifact.bounds.rules import RULES
from monograph.artifact.bounds.safe_ops import SIZE_UNKNOWN
from monograph.artifact.programs import shapes
from monograph.artifact.programs.operators import op_of
from monograph.artifact.programs.serialize import _argument_to_json, program_from_json
from monograph.artifact.programs.values import value_to_json
from monograph.backends.python.generated import generated
from monograph.checkpoint.errors import Damaged, Refused
from monograph.compat.ops import schema_arguments
from monograph.ir.meta import TensorMeta, describe, tensor_meta
from monograph.ir.program import Program
from monograph.plan.plan import Plan
from tests.stress.hostile import Moving, mutated, of_schema
from tests.stress.op_seeds import OpCall, calls_of, kept, recorded

OUTCOMES = ("ran", "refused", "failed", "other form", "out of memory of a view")
_SECONDS = 20  # that one call may take
_SEEDS = Path(f"build/stress/op-calls-{torch.__version__}.pickle")
# entries of torch's database that come to ops with rules
_QUICK = [
    "nn.functional.max_pool2d",
    "nn.functional.max_pool3d",
    "nn.functional.adaptive_max_pool2d",
    "nn.functional.adaptive_max_pool3d",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.embedding",
    "nn.functional.embedding_bag",
    "nn.functional.nll_loss",
    "nn.functional.ctc_loss",
    "nn.functional.multi_margin_loss",
    "nn.functional.pdist",
    "cdist",
    "fft.rfft",
    "fft.irfft",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.dropout",
    "nn.functional.threshold",
    "softmax",
    "log_softmax",
    "lu_unpack",
    "linalg.lu_solve",
]
_FROM_SCHEMA = 0.15  # of the calls


def allowed_ops() -> list[str]:
    """The exact names of the ops that load without trust."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        with contextlib.suppress(Damaged):
            op = op_of(f"{space}::{name}.{overload or 'default'}", trust=False)
            if any("Dimname" in item.kind for item in schema_arguments(op)):
                continue  # no file can say the name of a dimension
            found.append(f"{space}::{name}.{overload or 'default'}")
    return sorted(found)


# --- one call ------------------------------------------------------------------------------------------------------


def through_the_door(call: OpCall) -> str:
    """What becomes of an artifact's op with these arguments."""
    inputs: list[Any] = []
    graph = fx.Graph()

    def named(item: Any) -> Any:
        if not isinstance(item, (torch.Tensor, Moving)):
            return item
        inputs.append(item.number if isinstance(item, Moving) else item)
        return graph.placeholder(f"t{len(inputs) - 1}")

    args, kwargs = tree_map(named, (list(call.args), call.kwargs))
    try:
        row: list[Any] = ["made", call.op, [_argument_to_json(item, "op") for item in args]]
        row += [{key: _argument_to_json(item, "op") for key, item in kwargs.items()}, 0, None]
        ports = [[f"t{index}", "captured", f"captured.{index}"] for index in range(len(inputs))]
        document: dict[str, Any] = {"name": "step", "parts": [], "inputs": ports}
        document["given"] = [value_to_json(describe(item)) for item in inputs]
        document |= {
            "origins": [["forward", "", "", 0]],
            "nodes": [row],
            "results": {"tuple": []},
            "outputs": [],
        }
        program_from_json(document, trust=False)
        made = _told(call)  # after the first checks, as in a load
        row[-1] = value_to_json(made)
        document["nodes"] += _items(made)
        program = program_from_json(document, trust=False)
        with patch.object(unpacking, "check_values", _check_bytes):  # the file says what has just been found
            unpacking._check_rules(program)
    except (Damaged, Refused):
        return "refused"
    run = generated(Plan(_returning(program), {}, (), None))
    try:
        with torch.no_grad():
            result, *_ = run(inputs)
    except Exception:
        return "failed"
    told, found = _forms(call.op, made), _forms(call.op, describe(result))
    if any(not _in_memory(item) for item in tree_leaves(result) if isinstance(item, torch.Tensor)):
        return "out of memory of a view"
    return "ran" if told == found else "other form"


def _forms(op: str, described: Any) -> list[Any]:
    """Shapes, dtypes, and the strides that matter, of what is told of a result."""
    if isinstance(described, TensorMeta):
        pairs = zip(described.shape, described.stride, strict=True)
        strides = [step for size, step in pairs if size > 1 and 0 not in described.shape]
        return [(described.shape, described.dtype, strides)]
    if not isinstance(described, tuple):
        return []
    left_out = [index for name, index in SIZE_UNKNOWN if name == op.rpartition(".")[0]]
    return [
        each for index, item in enumerate(described) if index not in left_out for each in _forms(op, item)
    ]


def _items(made: Any) -> list[Any]:
    """The nodes that take a result apart."""
    if not isinstance(made, tuple):
        return []
    return [
        [f"item{index}", "python::getitem", ["made", index], {}, 0, value_to_json(item)]
        for index, item in enumerate(made)
        if isinstance(item, TensorMeta)
    ]


def _returning(program: Any) -> Any:
    """The program with what others would read of the op's result as its output."""
    output = program.graph.output_node()
    made = next(node for node in program.graph.nodes if node.name == "made")
    users = [node for node in program.graph.nodes if node.name.startswith(("item", "formed_"))]
    output.args = ((made, *users),)
    program.module.recompile()
    return program


def _in_memory(item: torch.Tensor) -> bool:
    if item.numel() == 0 or item.layout is not torch.strided:
        return True
    last = item.storage_offset() + sum(
        (size - 1) * step for size, step in zip(item.shape, item.stride(), strict=True)
    )
    return item.storage_offset() >= 0 and (last + 1) * item.element_size() <= item.untyped_storage().nbytes()


def _check_bytes(program: Program) -> None:
    for node in program.ops():
        check_bytes(node)


def _told(call: OpCall) -> Any:
    """What the file has to say of the result; `Damaged` if there is nothing that would do."""
    target = op_of(call.op, trust=True)
    try:
        with _without_data():
            fakes = tree_map(_fake, (list(call.args), call.kwargs))
            return describe(target(*fakes[0], **fakes[1]))
    except Exception:
        return _told_by_rule(target, call)


def _fake(item: Any) -> Any:
    if isinstance(item, Moving):
        return {bool: True, int: 1, float: 0.5}[type(item.number)]
    if isinstance(item, torch.Tensor):
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype)
    return item


def _told_by_rule(target: Any, call: OpCall) -> Any:
    rule = shapes._RULES.get(target)
    if rule is None:
        raise Damaged("no result") from None
    try:
        given = [
            (tuple(item.shape), item.dtype) if isinstance(item, torch.Tensor) else item for item in call.args
        ]
        form = rule(*given)
        first = next(item for item in call.args if isinstance(item, torch.Tensor))
        forms = form if isinstance(form[0], tuple) and form[0] and isinstance(form[0][0], tuple) else (form,)
        metas = tuple(tensor_meta(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in forms)
        metas = tuple(TensorMeta(item.shape, item.dtype, item.stride, first.device) for item in metas)
        return metas[0] if forms == (form,) else metas
    except Exception:
        raise Damaged("no result") from None


# --- many calls ----------------------------------------------------------------------------------------------------


@dataclass
class Share:
    """What a worker tells while it runs: the call that it is in, and how many of each outcome there were."""

    memory: Any = field(default_factory=lambda: mmap.mmap(-1, 4096))

    def __getitem__(self, index: int) -> int:
        return int(struct.unpack_from("<q", self.memory, 8 * index)[0])

    def __setitem__(self, index: int, value: int) -> None:
        struct.pack_into("<q", self.memory, 8 * index, value)


@dataclass(frozen=True)
class Death:
    """A call that ended its process, or did not end."""

    op: str
    number: int
    how: str


class Calls:
    """Calls by op and number, the same for the same seed."""

    def __init__(self, seed: int, *, quick: bool = False) -> None:
        self._seed = seed
        self._seeds = calls_of(recorded(_QUICK)) if quick else kept(_SEEDS)

    def make(self, op: str, number: int) -> OpCall:
        """One call."""
        choice = random.Random(f"{self._seed}/{op}/{number}")
        torch.default_generator.manual_seed(choice.randrange(1 << 40))
        target = op_of(op, trust=True)
        seeds = self._seeds.get(op) or self._siblings(op)
        if not seeds or choice.random() < _FROM_SCHEMA:
            return of_schema(op, target._schema, choice)
        seed = choice.choice(seeds)
        return mutated(OpCall(op, seed.args, seed.kwargs), choice)

    def _siblings(self, op: str) -> list[OpCall]:
        packet = op.rpartition(".")[0]
        return [
            call for name, calls in self._seeds.items() if name.rpartition(".")[0] == packet for call in calls
        ]


def work(calls: Calls, op: str, numbers: range, share: Share) -> None:
    """Make calls in a process of its own; ends the process."""
    warnings.simplefilter("ignore")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    for number in numbers:
        share[0] = number
        try:
            call = calls.make(op, number)
        except Exception:
            outcome = "refused"
        else:
            outcome = through_the_door(call)
        share[1 + OUTCOMES.index(outcome)] += 1
        if outcome in OUTCOMES[3:]:
            share[10 + OUTCOMES.index(outcome)] = number
    os._exit(0)


def deaths_of(
    calls: Calls, op: str, count: int, first: int, counts: Counter[str], most: int
) -> Iterator[Death]:
    """Let a worker make the calls of one op, another one going on behind each call that ends one."""
    share, last, died = Share(), first + count, 0
    while first < last and died < most:
        child = os.fork()
        if child == 0:
            try:
                work(calls, op, range(first, last), share)
            except BaseException:
                print(*traceback.format_exc().strip().splitlines()[-4:], sep="\n")
                sys.stdout.flush()
                os._exit(3)
        how = _wait(child, share)
        if how is None:
            break
        yield Death(op, share[0], how)
        died += 1
        first = share[0] + 1
    for index, outcome in enumerate(OUTCOMES):
        counts[outcome] += share[1 + index]
        if index >= 3 and share[1 + index]:
            counts[f"{outcome}: {op} {share[10 + index]} x{share[1 + index]}"] += 1


def _wait(child: int, share: Share) -> str | None:
    """How a child ended; None if well."""
    number, since, pause = share[0], time.monotonic(), 0.001
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if os.WIFSIGNALED(status):
                return signal.Signals(os.WTERMSIG(status)).name
            code = os.WEXITSTATUS(status)
            return None if code == 0 else f"exit {code}"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
        if share[0] != number:
            number, since = share[0], time.monotonic()
        elif time.monotonic() - since > _SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hangs"


# --- the command ---------------------------------------------------------------------------------------------------


def guarded(argv: Sequence[str]) -> bool:
    """Start again with guarded memory, where there is a compiler; True if this process has it."""
    if "guarded_memory" in os.environ.get("LD_PRELOAD", ""):
        return True
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return False
    library = Path(tempfile.mkdtemp()) / "guarded_memory.so"
    source = Path(__file__).with_name("guarded_memory.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "tests.stress.artifact_ops", *argv], environment)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=100_000, help="over all ops")
    parser.add_argument("--each", type=int, help="of each op")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=5, help="deaths of one op")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument(
        "--quick", action="store_true", help="only ops with rules, and what is recorded in seconds"
    )
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    if not options.plain and not guarded(sys.argv[1:]):
        print("no C compiler: accesses out of bounds are seen only where they end a process")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    calls = Calls(options.seed, quick=options.quick)
    ops = options.only or allowed_ops()
    if options.quick:
        ops = [op for op in ops if op.rpartition(".")[0] in RULES]
    through_the_door(
        calls.make("aten::add.Tensor", 0)
    )  # so that no worker has to import what the first call needs
    part, parts = map(int, options.part.split("/"))
    ops = ops[part::parts]
    each = options.each or -(-options.calls // (len(ops) * parts))
    counts: Counter[str] = Counter()
    deaths: list[Death] = []
    if options.here:
        call = calls.make(ops[0], options.first)
        faulthandler.enable()
        print(call, flush=True)
        print(through_the_door(call))
        return 0
    began = time.monotonic()
    for op in ops:
        for death in deaths_of(calls, op, each, options.first, counts, options.most):
            deaths.append(death)
            print(f"{death.how:8} {death.op} {death.number}", flush=True)
        if options.verbose:
            print("-", op, f"{time.monotonic() - began:.1f}", flush=True)
    for line, times in counts.items():
        print(f"{line} {times}")
    print(f"{len(ops)} ops, {len(deaths)} deaths, {time.monotonic() - began:.0f} s, seed {options.seed}")
    return bool(deaths)


if __name__ == "__main__":
    sys.exit(main())
