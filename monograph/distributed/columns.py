"""A mesh of copies and stages: along one dimension ranks are the stages of a pipeline, along the other they train copies of it."""

from __future__ import annotations

from typing import Any, Final

from monograph.compat.distributed.groups import num_processes
from monograph.errors import ConfigError, DistributedError, shown

STAGES_DIM: Final = "pp"  # what users of torch call the dimension of stages
EXAMPLE: Final = 'enable_data_parallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")))'


def has_stages(mesh: Any) -> bool:
    """True for a mesh of two dimensions, one of which has the stages of a pipeline."""
    return getattr(mesh, "ndim", 0) == 2 and STAGES_DIM in (mesh.mesh_dim_names or ())


def check_mesh(mesh: Any) -> None:
    """Raise ConfigError for what is no mesh of copies, and none of copies and stages."""
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if STAGES_DIM in names and len(names) > 2:
        raise ConfigError(
            f"enable_data_parallel() got a mesh of the dimensions {', '.join(names)}: a pipeline has stages and copies, and each process has "
            "the whole parameters of its stages",
            hint=f"make a mesh of two dimensions, as {EXAMPLE}; modules in parts are trained without set_stage()",
        )
    if mesh is not None and getattr(mesh, "ndim", 0) != 1 and not has_stages(mesh):
        raise ConfigError(
            f"enable_data_parallel(mesh={shown(mesh)}): a DeviceMesh of one dimension is needed, or of two with one that is named "
            f"{STAGES_DIM!r}",
            hint='pass one dimension of a larger one: mesh["dp"]',
        )


def mesh_text(mesh: Any) -> str:
    """A mesh in words, the same on all its ranks."""
    return (
        f"a mesh of the dimensions {', '.join(mesh.mesh_dim_names or ())} and the ranks {mesh.mesh.tolist()}"
    )


def group_of_stages(mesh: Any) -> Any:
    """The processes that share the stages of a copy with this one. Raises DistributedError if the mesh is not over all processes."""
    if mesh.size() != num_processes():
        raise DistributedError(
            f"the mesh of a pipeline has {mesh.size()} processes, and there are {num_processes()}",
            hint="make it over all processes: init_device_mesh() does",
        )
    return mesh.get_group(STAGES_DIM)


def group_of_copies(mesh: Any) -> Any:
    """The processes that train copies of what this one trains, of a mesh of one dimension or one with stages."""
    return mesh.get_group(1 - mesh.mesh_dim_names.index(STAGES_DIM) if has_stages(mesh) else 0)
