"""The machine that a run was made on."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import monograph as mg
from benchmarks.record import Machine

PACKAGES = ("monograph", "torch", "jax", "jaxlib", "optax", "numpy")


def machine(cores: int, threads: int, gemm_flops_per_second: dict[str, float]) -> Machine:
    """What is known about this machine and its libraries."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=cpu_name(),
        cores=cores,
        threads=threads,
        memory_bytes=pages,
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        versions=versions(),
        gemm_flops_per_second=gemm_flops_per_second,
    )


def cpu_name() -> str:
    """The name, family and model that the processor gives itself."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    fields: dict[str, str] = {}
    for line in info.read_text().split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name", platform.processor())
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def versions() -> dict[str, str]:
    """The installed packages that take part; of Monograph also a name for what is measured."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["monograph"] = f"{found.get('monograph', '?')} (sources {sources()})"
    return found


def sources() -> str:
    """A name for the files of Monograph and of this suite."""
    digest = hashlib.sha256()
    for folder in (Path(mg.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".h"):
                digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]
