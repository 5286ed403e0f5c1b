"""OneFlow's names, so that its scripts run: `import monograph.flow as flow`, `import monograph.flow.nn as nn`.

A name that PyTorch has too is PyTorch's object. What only OneFlow has is here, or raises UnavailableError with the
reason and the alternative.
"""

import torch
from torch.nn import functional

import monograph
from monograph.flow import amp, boxing, comm, env, nn, optim, sbp, utils
from monograph.flow.functions import (
    batch_gather,
    broadcast_like,
    cast,
    convert_oneflow_dtype_to_numpy_dtype,
    dtypes,
    gather_nd,
    in_top_k,
    quick_gelu,
    roc_auc_score,
    scatter_nd,
    slice,
    slice_update,
    tensor_scatter_nd_update,
)
from monograph.flow.names import forwarding, listing, share_namespaces
from monograph.flow.saving import load, save
from monograph.flow.tensors.shared import FACTORIES, give_methods, placement, to_global, to_local
from monograph.flow.tensors.typed import TYPED, Tensor, let_scripts_read_histories, set_default_tensor_type

__all__ = [
    "Tensor",
    "amp",
    "batch_gather",
    "boxing",
    "broadcast_like",
    "cast",
    "comm",
    "convert_oneflow_dtype_to_numpy_dtype",
    "dtypes",
    "env",
    "gather_nd",
    "in_top_k",
    "load",
    "nn",
    "optim",
    "placement",
    "quick_gelu",
    "roc_auc_score",
    "save",
    "sbp",
    "scatter_nd",
    "slice",
    "slice_update",
    "tensor_scatter_nd_update",
    "to_global",
    "to_local",
    "utils",
]

_OF_FUNCTIONAL = (
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "gelu",
    "mish",
    "pad",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
)
_OF_JIT = ("ignore", "is_scripting", "is_tracing", "script", "unused")
_OF_TENSORS = (
    "contiguous",
    "div_",
    "erfinv_",
    "expand",
    "gt_",
    "index_add_",
    "lerp_",
    "masked_fill_",
    "new_empty",
    "new_full",
    "new_ones",
    "new_zeros",
    "repeat",
    "view",
)

share_namespaces()
let_scripts_read_histories()
give_methods()
__getattr__ = forwarding(
    "",
    torch,
    {
        **{name: getattr(functional, name) for name in _OF_FUNCTIONAL},
        **{name: getattr(torch.Tensor, name) for name in _OF_TENSORS},
        **TYPED,
        **FACTORIES,
        "__version__": monograph.__version__,
        "autocast_decorator": amp.autocast_decorator,
        "global_to_global": to_global,
        "local_to_global": to_global,
        "set_default_tensor_type": set_default_tensor_type,
        **{name: getattr(torch.jit, name) for name in _OF_JIT},
    },
)
__dir__ = listing(globals(), torch)
