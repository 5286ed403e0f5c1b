"""Names whose calls through the dual `torch` are not aligned, each with its cause."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_DATA = "makes a tensor out of Python data: in a graph that is a constant, there is nothing to compute"
_MEMORY = "gives memory as it was found: any content is right"
_MODULE = "changes how a module works, and gives the module back: the calls after it are aligned"
_READ = "reads values into Python: a graph knows those of arguments and state, and refuses others by name"
_AUTOGRAD = "is autograd's own bookkeeping: each aligned call has its own backward"
_STATE = "changes or reads a setting of the process, computes nothing"
_FOREIGN = "makes or fills tensors from outside of torch"

EXCLUDED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("tensor", "as_tensor", "asarray", "scalar_tensor", "Tensor", "new_tensor", "new"), _DATA
        ),
        "Parameter": "makes a parameter out of a tensor: a leaf of its own, not a computation",
        **dict.fromkeys(
            ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
            _MEMORY,
        ),
        **dict.fromkeys(
            ("train", "eval", "requires_grad_", "apply"),
            _MODULE,
        ),
        "to": "gives the tensor itself where device and dtype are what they were; other calls of it are aligned",
        **dict.fromkeys(
            (
                "parameters",
                "named_parameters",
                "buffers",
                "named_buffers",
                "children",
                "named_children",
                "modules",
                "named_modules",
                "state_dict",
                "get_parameter",
                "get_buffer",
                "get_submodule",
            ),
            "gives what a module holds, computes nothing",
        ),
        **dict.fromkeys(
            ("load_state_dict", "register_buffer", "register_parameter", "add_module", "zero_grad"),
            "changes what a module holds from outside of a step",
        ),
        **dict.fromkeys(("item", "tolist", "numpy", "__array__", "is_nonzero", "equal", "allclose"), _READ),
        **dict.fromkeys(
            ("backward", "grad", "retain_grad", "detach_", "register_hook", "is_leaf", "requires_grad"),
            _AUTOGRAD,
        ),
        **dict.fromkeys(
            (
                "manual_seed",
                "seed",
                "initial_seed",
                "get_rng_state",
                "set_rng_state",
                "set_default_dtype",
                "set_default_device",
                "set_num_threads",
                "set_grad_enabled",
                "set_printoptions",
            ),
            _STATE,
        ),
        **dict.fromkeys(("from_numpy", "frombuffer", "from_dlpack", "from_file", "load", "save"), _FOREIGN),
        **dict.fromkeys(
            ("data", "set_", "resize_", "resize_as_", "untyped_storage", "storage"),
            "reaches around autograd to the memory of a tensor: a graph does not follow it",
        ),
        **dict.fromkeys(
            ("pin_memory", "share_memory_"), "says where memory is, and leaves the values as they are"
        ),
    }
)
