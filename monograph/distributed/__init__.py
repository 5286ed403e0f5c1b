"""Steps that several processes take together: gradients are averaged, buffers are those of the first process.

In: the modules of a graph, wrappers around them, the settings. Out: collectives, recorded or run in eager mode. For users:
tensors that processes share, by OneFlow's words. Imports `ir`, `ir/call`, `state`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monograph.distributed import sbp
    from monograph.distributed.global_tensors import made_global, sbp_of, to_global, to_local
    from monograph.distributed.placements import placement

__all__ = ["made_global", "placement", "sbp", "sbp_of", "to_global", "to_local"]


def __getattr__(name: str) -> Any:
    """Words for users are imported when they are asked for: training alone does without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    places = {"sbp": "sbp", "placement": "placements"}
    found = importlib.import_module(f"monograph.distributed.{places.get(name, 'global_tensors')}")
    return found if name == "sbp" else getattr(found, name)
