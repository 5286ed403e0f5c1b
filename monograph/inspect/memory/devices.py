"""How many bytes a program holds on each device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from monograph.ir.meta import metas, value
from monograph.plan.alias import Storage
from monograph.plan.memory import peak_of, timeline_of
from monograph.plan.plan import Plan


def peaks_by_device(plan: Plan) -> Mapping[str, int]:
    """What a program itself holds at most on each device, at the moment at which most is held there; the most first."""
    placed = _placed(plan)
    devices = sorted(set(placed.values()))
    if len(devices) < 2:
        return dict.fromkeys(devices, plan.memory.peak_bytes)
    found = {device: _peak_on(device, plan, placed) for device in devices}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _placed(plan: Plan) -> dict[Storage, str]:
    """The device of each piece of memory that the program makes."""
    nodes = {node.name: node for node in plan.program.graph.nodes}
    storages = {storage for shown in plan.aliases.certain.values() for storage in shown if storage.nbytes}
    made = {item for item in storages if nodes[item.maker].op not in ("placeholder", "get_attr")}
    return {storage: _device_of(storage, nodes[storage.maker]) for storage in made}


def _device_of(storage: Storage, maker: fx.Node) -> str:
    described = list(metas(value(maker)))
    fitting = [meta for meta in described if meta.extent == storage.nbytes]
    return str((fitting or described)[0].device)


def _peak_on(device: str, plan: Plan, placed: Mapping[Storage, str]) -> int:
    """The peak of the program without what is on other devices."""
    memory = plan.aliases
    kept = frozenset(
        storage
        for shown in memory.certain.values()
        for storage in shown
        if placed.get(storage, device) == device
    )
    there = {name: shown & kept for name, shown in memory.certain.items()}
    inside = {
        part.program.name: replace(part.memory, peak_bytes=peaks_by_device(part).get(device, 0))
        for part in plan.parts
    }
    timeline = timeline_of(plan.program, plan.frees, replace(memory, certain=there), inside)
    return peak_of(timeline).running_bytes
