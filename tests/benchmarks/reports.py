"""Reports made by hand."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.record import Machine, Measured, Memory, Prepared, Report, Result, Round, Trial

MACHINE = Machine(
    cpu="a processor",
    cores=4,
    threads=2,
    memory_bytes=2**34,
    system="a system",
    versions={"torch": "2.13.0"},
    gemm_flops_per_second={"torch.mm": 100e9, "oneDNN": 200e9},
)


def rounds(*milliseconds: float, steps: int = 10) -> tuple[Round, ...]:
    """Rounds whose steps took so long, on two threads, and at best half as long."""
    return tuple(
        Round(
            steps=steps,
            wall_seconds=ms * steps / 1e3,
            cpu_seconds=2 * ms * steps / 1e3,
            fastest_seconds=ms / 2e3,
        )
        for ms in milliseconds
    )


def measured(name: str, *milliseconds: float, error: str | None = None) -> Measured:
    """A competitor; one with an error never ran."""
    own, is_torch = name.startswith("monograph-"), name in ("eager", "compile", "compile-step")
    if error is not None:
        return Measured(name, name, is_torch, own, error=error, trials=(Trial("foreach", error),))
    prepared = Prepared(
        (1.0, 0.9, 0.8),
        {},
        first_step_seconds=3.0,
        compile_seconds=2.5,
        step_seconds=0.01,
        capture_seconds=0.75 if own else None,
    )
    trial = Trial("foreach", prepared=prepared)
    return Measured(
        name,
        name,
        is_torch,
        own,
        trials=(trial,),
        chosen=trial,
        rounds=rounds(*milliseconds),
        memory=Memory(peak_bytes=300 * 2**20, step_bytes=20 * 2**20, start_bytes=500 * 2**20),
        warm=replace(prepared, first_step_seconds=1.25),
    )


def result(*competitors: Measured, name: str = "mlp64", flops: int = 200_000_000) -> Result:
    """A workload whose products take one millisecond at best."""
    return Result(name, f"the title of {name}", flops, (1.0, 0.9, 0.8), competitors)


def report(*results: Result) -> Report:
    """A run on the machine above."""
    return Report(("2026-01-01 00:00 UTC",), "monograph bench", MACHINE, results)
