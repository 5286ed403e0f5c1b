"""Values that eager mode refuses, for the ops of torch's database: compiled code refuses them too.

Each op is compiled alone, in a process of its own, with a sample of the database as arguments. Then single elements of
them are replaced by values that some op takes for wrong: negative and large indices, and numbers outside of [0, 1].
Where eager mode raises, the graph must; where it takes an index, the results are its results.

Run `python -m tests.stress.refused_values`; `--only NAME` tries one op. An op takes about ten seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import monograph as mg

Tensors = tuple[torch.Tensor, ...]
OPS = {op.full_name: op for op in op_db if torch.float32 in op.supported_dtypes("cpu")}
INDICES = (-1, -2, -100, 100, 0, 1, 1_000_000)
NUMBERS = (float("nan"), float("inf"), -1.0, -0.5, 2.0, 0.0)
SAMPLES = 2  # of an op that are compiled
_LARGEST = 3000  # elements of a sample's tensor
_SECONDS = 300.0  # that an op may take
# what draws in Python, which no graph captures; sparse tensors; ops of the database that are no ops of torch
_LEFT_OUT = re.compile(
    r"jiterator|sparse|signal|rand|empty|uniform|normal|exponential|cauchy|geometric|bernoulli|multinomial|_scaled_mm"
)
# ops whose eager kernels crash, take memory as an index says, or leave results to chance with such values
_NO_REFERENCE = re.compile(
    r"segment_reduce.offsets|bincount|one_hot|_unsafe_masked_index|eig|svd|pca_lowrank|lstsq|tensor_split|ldl_solve|pinv.singular"
)


@dataclass(frozen=True)
class Trial:
    """One call with a wrong value: what is wrong, the arguments, and what eager mode says."""

    told: str
    arguments: Tensors
    expected: str | list[torch.Tensor]


def trials_of(function: Callable[..., Any], arguments: Tensors) -> Iterator[Trial]:
    """Calls that eager mode refuses, and all calls with other indices."""
    for place, argument in enumerate(arguments):
        is_index = argument.dtype in (torch.int32, torch.int64)
        if not is_index and not argument.is_floating_point():
            continue
        for value in INDICES if is_index else NUMBERS:
            for where in (slice(0, 1), slice(-1, None), slice(None)):
                changed = argument.clone(memory_format=torch.preserve_format)
                elements = changed.flatten()
                elements[where] = value
                changed.copy_(elements.view_as(changed))
                given = (*arguments[:place], changed, *arguments[place + 1 :])
                expected = said(function, given)
                if is_index or isinstance(expected, str):
                    yield Trial(f"argument {place}, {value} at {where.start}:{where.stop}", given, expected)


def said(function: Callable[..., Any], arguments: Tensors) -> str | list[torch.Tensor]:
    """The tensors of a result, or the name of the error."""
    try:
        result = function(*(item.clone(memory_format=torch.preserve_format) for item in arguments))
    except Exception as error:
        return type(error).__name__
    return [item.detach() for item in tree_leaves(result) if isinstance(item, torch.Tensor)]


def samples_of(name: str) -> Iterator[tuple[Callable[..., Any], Tensors]]:
    """Samples of an op that eager mode takes, as functions of their tensors."""
    op = OPS[name]
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", torch.float32):
        leaves, form = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = tuple(leaves[place].detach() for place in places)

        def function(
            *given: torch.Tensor, leaves: list[Any] = leaves, form: Any = form, places: list[int] = places
        ) -> Any:
            filled = leaves.copy()
            for place, tensor in zip(places, given, strict=True):
                filled[place] = tensor
            first, args, kwargs = tree_unflatten(filled, form)
            return op.op(first, *args, **kwargs)

        fit = bool(tensors) and all(0 < item.numel() <= _LARGEST for item in tensors)
        if fit and not isinstance(said(function, tensors), str):
            yield function, tensors


def tried(name: str) -> list[str]:
    """What is wrong with an op, a line each; compiles only what eager mode may refuse."""
    found: list[str] = []
    compiled = 0
    for function, arguments in samples_of(name):
        trials = list(trials_of(function, arguments))
        if not trials:
            continue
        graph = mg.trace(lambda *given, function=function: function(*given))
        graph.config.backend("inductor")
        if isinstance(error := said(graph, arguments), str):
            found.append(f"{name}: not captured: {error}")
            continue
        for trial in trials:
            if (different := _difference(trial.expected, said(graph, trial.arguments))) is not None:
                found.append(f"{name} ({graph.builds[0].backend}), {trial.told}: {different}")
        compiled += 1
        if compiled == SAMPLES:
            break
    return found if compiled or found else ["nothing to refuse"]


def _difference(expected: str | list[torch.Tensor], got: str | list[torch.Tensor]) -> str | None:
    if isinstance(expected, str) or isinstance(got, str):
        if isinstance(expected, str) and isinstance(got, str):
            return None
        kind = expected if isinstance(expected, str) else f"takes it, the graph raises {got}"
        return f"eager mode {'raises ' if isinstance(expected, str) else ''}{kind}"
    try:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    except AssertionError as error:
        return f"other numbers: {str(error).splitlines()[0]}"
    return None


def _tell(name: str, answers: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answers.put(tried(name))


def in_a_process(name: str) -> list[str]:
    """`tried` in a process of its own, which may end or hang."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_tell, args=(name, answers))
    process.start()
    process.join(_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return [f"{name}: took more than {_SECONDS:.0f} s"]
    return answers.get() if process.exitcode == 0 else [f"{name}: the process ended with {process.exitcode}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try all ops, or one; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="the full name of an op in torch's database")
    options = parser.parse_args(arguments)
    names = [name for name in OPS if not _LEFT_OUT.search(name) and not _NO_REFERENCE.search(name)]
    counted: Counter[str] = Counter()
    for name in [options.only] if options.only else names:
        found = in_a_process(name)
        counted["nothing to refuse" if found == ["nothing to refuse"] else "wrong" if found else "right"] += 1
        if found != ["nothing to refuse"]:
            print("\n".join(found) or f"{name}: right", flush=True)
    print(", ".join(f"{number} ops {what}" for what, number in sorted(counted.items())))
    return 1 if counted["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
