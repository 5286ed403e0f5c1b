"""Process groups: their names in a program, which are the same in every process, and their sizes."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Sequence
from functools import cache, partial
from itertools import count
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist

_MESHES: Final = threading.Lock()  # around what a mesh finds in its module while it is made
FAKE: Final = "fake"  # torch's name for groups whose other processes are not there
_PREFIX: Final = "monograph/"
_ANY_GROUP: Final = "undefined"  # what torch says of a group that nobody has described


def num_processes() -> int:
    """How many processes there are that have found each other; 1 without a process group."""
    return dist.get_world_size() if has_group() else 1


def store_of(group: Any) -> Any:
    """The store of a group, by which its processes have found each other; None without one.

    What: that of a group in C++, and torch's table for one that is written in Python. Degraded path: None.
    """
    if (store := group.get_group_store()) is not None:
        return store
    world: Any = getattr(importlib.import_module("torch.distributed.distributed_c10d"), "_world", None)
    _, store = getattr(world, "pg_map", {}).get(group, (None, None))
    return store


def said_first(key: str, word: str = "") -> str:
    """What the first process that had a word for a key has said, which may be this one; empty without such a word.

    What: the store of the group of all processes. Degraded path: none needed, each then keeps to its own word.
    """
    if num_processes() == 1 or dist.get_backend() == FAKE or (store := store_of(whole_group())) is None:
        return word
    name = f"{_PREFIX}{key}"
    if word:
        return str(store.compare_set(name, "", word).decode())
    return str(store.get(name).decode()) if store.check([name]) else ""


def has_others() -> bool:
    """True if there are other processes, and not only in a plan."""
    return num_processes() > 1 and dist.get_backend() != FAKE


def own_rank() -> int:
    """The number of this process; 0 without a process group."""
    return dist.get_rank() if has_group() else 0


def has_group() -> bool:
    """True in a process that has found others, or is known to be the only one."""
    return dist.is_available() and dist.is_initialized()


def whole_group() -> Any:
    """The group of all processes. There has to be one."""
    return dist.group.WORLD


def mesh_of_all(device: str, name: str) -> Any:
    """A mesh of one dimension of this name over all processes."""
    return grid_of_all(_known_to_torch(device), (num_processes(),), (name,))


def grid_of_all(device: str, sizes: Sequence[int], names: Sequence[str] | None = None) -> Any:
    """A mesh of these sizes over all processes."""
    device_mesh = importlib.import_module("torch.distributed.device_mesh")
    return device_mesh.init_device_mesh(
        device, tuple(sizes), mesh_dim_names=None if names is None else tuple(names)
    )


def mesh_of_group(group: Any, device: str, name: str) -> Any:
    """A mesh of one dimension of this name over the processes of a group."""
    device_mesh = importlib.import_module("torch.distributed.device_mesh")
    known = _known_to_torch(device)
    return device_mesh.DeviceMesh.from_group(group, known, mesh_dim_names=(name,))


def _known_to_torch(device: str) -> str:
    """What is on meta, as in a plan, is laid out as on the CPU."""
    return "cpu" if device == "meta" else device


def mesh_over(device: str, ranks: tuple[Any, ...]) -> Any:
    """The mesh of these ranks, which may be nested; one object for the life of a process group.

    All processes have to ask for it the first time. Raises NoMesh.
    """
    return _mesh_over(device, ranks, ref(whole_group()))


@cache
def _mesh_over(device: str, ranks: tuple[Any, ...], _world: Any) -> Any:
    if ranks == tuple(range(num_processes())):
        return grid_of_all(device, (len(ranks),))  # on the group that there is
    device_mesh = importlib.import_module("torch.distributed.device_mesh")
    if _is_in_order(torch.tensor(ranks)):
        return device_mesh.DeviceMesh(device, ranks)
    if why := _why_no_mesh(ranks):
        raise NoMesh(why)
    return _mesh_in_any_order(device_mesh, device, ranks)


class NoMesh(Exception):
    """Why torch can make no mesh of ranks that do not ascend."""


def _why_no_mesh(ranks: tuple[Any, ...]) -> str:
    """The same; "" if it can. Its groups sort their ranks, unless they are asked not to."""
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        return f"torch {torch.__version__} sorts the ranks of a group"
    shape = torch.tensor(ranks).shape
    if len(shape) > 1 and num_processes() in shape:
        return "all ranks are along one of several dimensions"
    if len(shape) > 1 and getattr(whole_group(), "bound_device_id", None) is not None:
        return "groups that are split off a group with a device_id have theirs sorted"
    return ""


def _is_in_order(ranks: torch.Tensor) -> bool:
    """True if ranks ascend along each dimension."""
    return all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.dim()))


def _mesh_in_any_order(device_mesh: Any, device: str, ranks: tuple[Any, ...]) -> Any:
    """A mesh whose groups have the order of its ranks.

    What: `new_group(sort_ranks=False)`, where the mesh makes its groups. Why: else it sorts the ranks of each, and DTensor's collectives
    take parts for those of other ranks. Degraded path: NoMesh.
    """
    original = dist.new_group
    in_order = partial(original, sort_ranks=False)
    if all(type(rank) is int for rank in ranks) and len(ranks) == num_processes():
        return device_mesh.DeviceMesh.from_group(in_order([*ranks]), device)  # not the group that there is
    with _MESHES:
        device_mesh.new_group = in_order
        try:
            return device_mesh.DeviceMesh(device, ranks)
        finally:
            device_mesh.new_group = original


def import_fake_collectives() -> None:
    """What: the shapes of what collectives make, which torch registers with its Python. Degraded path: none needed."""
    importlib.import_module("torch.distributed._functional_collectives")


def shared_name(group: Any) -> str:
    """The name by which a group is known in programs; `group` may be a name that torch gave.

    What: torch's table of groups by name. Why: torch counts the groups of a process, so that its names differ between
    processes; texts and digests of programs must not. Degraded path: none, such a program could not be compared.
    """
    table = torch_groups()
    found = table._resolve_process_group(group) if isinstance(group, str) else group
    if isinstance(group, str) and group.startswith(_PREFIX):
        return group
    kind = _PREFIX + _kind(found)
    for number in count(1):
        name = kind if number == 1 else f"{kind}.{number}"
        try:
            known = table._resolve_process_group(name)
        except (RuntimeError, ValueError, KeyError):
            table._register_process_group(name, found)
            return name
        if known is found or known.group_name == found.group_name:
            return name
    raise AssertionError("there are more names than groups")


def _kind(group: Any) -> str:
    if group is dist.group.WORLD:
        return "world"
    described = getattr(group, "group_desc", _ANY_GROUP)
    return "group" if described == _ANY_GROUP else str(described).removeprefix("mesh_")


def group_size(name: str) -> int:
    """The number of processes in the group of a name."""
    return int(torch_groups()._resolve_process_group(name).size())


def group_named(name: str) -> Any:
    """The group of a name."""
    return torch_groups()._resolve_process_group(name)


def rank_in(name: str) -> int:
    """The number of this process in the group of a name."""
    return int(group_named(name).rank())


def objects_of_all(item: Any, name: str) -> list[Any]:
    """What each process in the group of a name gives, in their order; it has to be possible to pickle it."""
    group = group_named(name)
    found = [None] * int(group.size())
    dist.all_gather_object(found, item, group=group)
    return found


def ranks_in(name: str) -> tuple[int, ...]:
    """The processes in the group of a name, by their numbers among all."""
    return tuple(dist.get_process_group_ranks(group_named(name)))


def torch_groups() -> Any:
    """What: the module in C++ with the table of groups."""
    return importlib.import_module("torch._C._distributed_c10d")
