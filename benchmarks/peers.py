"""Who is measured: the peers, and Monograph once for each backend."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import monograph as mg
from benchmarks import setting
from benchmarks.setting import Setting
from benchmarks.workload import Workload

REFERENCE = "reference"  # eager PyTorch, one tensor after the other: it says which losses are right
OWN_PREFIX = "monograph-"
OWN_BACKENDS = ("aten", "exact", "auto", "inductor")
WITH_EAGERS_BITS = ("aten", "exact", "auto")


@dataclass(frozen=True)
class Peer:
    """A way to run a training step, and what it may be set to."""

    name: str
    title: str
    settings: tuple[Setting, ...]
    image_settings: tuple[Setting, ...]
    is_torch: bool = False  # a way of PyTorch itself

    @property
    def is_own(self) -> bool:
        """True for Monograph."""
        return self.name.startswith(OWN_PREFIX)

    def choices(self, workload: Workload) -> tuple[Setting, ...]:
        """The settings to try; images may also be laid out with their channels last."""
        return (self.image_settings if workload.has_images else ()) + self.settings


def all_peers() -> dict[str, Peer]:
    """Every competitor by name; the backends are those that this Monograph accepts."""
    peers = (
        Peer("eager", "PyTorch eager", setting.EAGER, setting.EAGER_IMAGES, is_torch=True),
        Peer(
            "compile",
            "torch.compile of model and loss, compiled optimizer step",
            setting.COMPILE,
            setting.COMPILE_IMAGES,
            is_torch=True,
        ),
        Peer(
            "compile-step",
            "torch.compile of the whole step (trace_autograd_ops)",
            setting.WHOLE,
            setting.WHOLE_IMAGES,
            is_torch=True,
        ),
        Peer("jax", "JAX jit and optax, donated state", setting.JAX, setting.JAX_IMAGES),
        *(own_peer(backend) for backend in own_backends()),
    )
    return {peer.name: peer for peer in peers}


def own_peer(backend: str) -> Peer:
    """Monograph on one backend."""
    name, title = f"{OWN_PREFIX}{backend}", f"Monograph, {backend}"
    if backend in WITH_EAGERS_BITS:
        return Peer(name, title, setting.OWN, setting.OWN_IMAGES)
    return Peer(name, title, setting.OWN_COMPILED, setting.OWN_COMPILED_IMAGES)


def own_backends() -> list[str]:
    """The backends for a CPU that this Monograph has."""
    graph = mg.trace(abs)
    found = []
    for name in OWN_BACKENDS:
        try:
            graph.config.backend(name)
        except mg.DefinitionError:
            continue
        found.append(name)
    return found


def missing(peer: Peer) -> str | None:
    """Why the peer cannot run here, if it cannot. Looks for JAX without importing it."""
    absent = [name for name in ("jax", "optax") if find_spec(name) is None]
    if peer.name == "jax" and absent:
        return f"{' and '.join(absent)} not installed: pip install 'monograph[bench]'"
    return None
