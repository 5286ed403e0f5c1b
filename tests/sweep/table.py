"""The tables of the docs, made from the databases and the expectations: `python -m tests.sweep.table` writes them.

The sweep is green only if its results are the expectations, so that no result is needed to write what it found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.sweep.expectations import Cause, Expectations, read
from tests.sweep.special import KINDS_OF_CALLS, op_of
from tests.sweep.sweeps import ATEN, INDUCTOR, ROOT, SPECIAL, SWEEPS

GROUPS = {
    "op_db/forward": "ops, forward",
    "op_db/backward": "ops, forward and backward",
    "module_db/train": "modules, training step",
    "module_db/eval": "modules, forward in eval mode",
    "optim_db": "configurations of optimizers, four steps",
    **{f"special/{kind}": f"ops and chains, {kind}" for kind in KINDS_OF_CALLS},
}
KINDS = {
    "refused": "refused by design, with a named error",
    "upstream": "a fault of torch, which a script in `tests/sweep/upstream/` shows without Monograph",
    "undefined": "values that torch leaves undefined",
    "eager": "eager mode refuses the call itself",
    "rounding": "eager mode's own rounding, or the order in which it computes, decides",
    "fallback": "not compiled: the step runs on the aten backend, which a warning says",
}

_HEADS = {
    ATEN.mode: """# What is aligned

torch tests itself with databases of operators, modules and optimizers. `make sweep` runs all of them in float32 on the
CPU through `monograph.testing.align`: up to ten samples of each, three calls per sample with other values, in worker
processes, and compares every bit, shape, stride and random number with eager mode. This page is made from its
expectations (`tests/sweep/expectations.toml`) by `python -m tests.sweep.table`; a sweep fails if a result is not as
expected, also if something passes that was expected to deviate.

torch {torch}, {samples:,} samples.

""",
    INDUCTOR.mode: """# What is aligned when it is compiled

`make sweep-inductor` compiles torch's own database of operators with the `inductor` backend, in float32 on the CPU: of
each operator one sample, the first that eager mode and the aten backend take, forward and backward as one step, called
up to three times with other values. `monograph.testing.align` judges it: shapes, strides and random numbers as in eager
mode, values at most twice as far from float64 as eager's. A step that was not compiled does not pass. This page is
made from its expectations (`tests/sweep/expectations-inductor.toml`) by `python -m tests.sweep.table`; a sweep fails if
a result is not as expected, also if something passes that was expected to deviate.

torch {torch}.

""",
    SPECIAL.mode: """# Special values in compiled steps

`make sweep-special` calls torch's own database of operators, compiled with the `inductor` backend on the CPU, on what is
special in a type: NaN, infinities, both zeros, denormals, the largest and smallest numbers, limits of integers; and
short chains of ops in which a compiler may simplify too much (`tests/sweep/chains.py`). Elementwise ops get every value,
or each with each, others rows of them. A result is right that is NaN, infinite or zero where plain PyTorch's is, with
its sign, and else differs from it by rounding; where PyTorch's kernels for vectors and for single elements disagree,
either is right. Thirty ops are compiled as one step. What only moves, draws, or is left to kernels of torch's libraries
(products, transforms, decompositions of matrices) is not in it. This page is made from its expectations
(`tests/sweep/expectations-special.toml`) by `python -m tests.sweep.table`; a sweep fails if a result is not as expected,
also if something passes that was expected to deviate.

torch {torch}, {samples:,} ops.

""",
}
_PASSES = {
    ATEN.mode: "bitwise in all samples",
    INDUCTOR.mode: "compiled and aligned",
    SPECIAL.mode: "all as eager",
}


def page(expected: Expectations) -> str:
    """The text of the page."""
    head = _HEADS[expected.sweep.mode]
    head = head.format(torch=expected.torch, samples=sum(expected.samples.values()))
    return head + "\n".join([*_counts(expected), "", "## Deviations", "", *_deviations(expected)]) + "\n"


def _counts(expected: Expectations) -> Iterator[str]:
    yield f"| | all | {_PASSES[expected.sweep.mode]} | refused by name | other deviations | samples |"
    yield "|---|---|---|---|---|---|"
    kinds = {
        case: {expected.causes[row.cause].kind for row in expected.rows if row.case == case}
        for case in expected.cases
    }
    for group, told in GROUPS.items():
        cases = [case for case in expected.sweep.cases() if case.group == group]
        if not cases:
            continue
        deviating = [kinds[case.key] for case in cases if case.key in kinds]
        refused = sum(found == {"refused"} for found in deviating)
        counts = len(cases), len(cases) - len(deviating), refused, len(deviating) - refused
        yield f"| {told} | {' | '.join(map(str, counts))} | {expected.samples[group]:,} |"


def _deviations(expected: Expectations) -> Iterator[str]:
    for kind, told in KINDS.items():
        causes = [cause for cause in expected.causes.values() if cause.kind == kind]
        if causes:
            yield f"**{told[0].upper()}{told[1:]}.**"
            yield ""
            yield f"| cause | where{', samples that deviate' if expected.counts_samples else ''} |"
            yield "|---|---|"
            yield from (f"| {_told(cause)} | {', '.join(_places(cause, expected))} |" for cause in causes)
            yield ""


def _told(cause: Cause) -> str:
    script = f" ([script](../tests/sweep/upstream/{cause.script}))" if cause.script else ""
    return f"{cause.why}{script}"


def _places(cause: Cause, expected: Expectations) -> Iterator[str]:
    """`masked_select` forward (7), backward (7)."""
    found: Counter[tuple[str, str]] = Counter()
    for row in expected.rows:
        if row.cause == cause.name:
            database, name, part = row.case.split("/", 2)
            if database == "special":
                found.update((op_of(row.case, index), name) for index in row.samples)
                continue
            # all configurations of an optimizer are one place
            found[name, "configurations" if database == "optim_db" else part] += len(row.samples)
    for name in dict.fromkeys(name for name, _ in found):
        parts = [
            f"{part} ({count})" if expected.counts_samples else part
            for (other, part), count in found.items()
            if other == name
        ]
        yield f"`{name}` {', '.join(parts)}"


def main() -> None:
    """Write the pages."""
    for sweep in SWEEPS.values():
        sweep.page.write_text(page(read(sweep)))
        print(f"wrote {sweep.page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
