"""Names of OneFlow's that have no counterpart here: why, and what to use instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from monograph import MonographError

_Error = TypeVar("_Error", bound=MonographError)


@dataclass(frozen=True)
class Refusal:
    """Why a name is not here, and the alternative."""

    reason: str
    instead: str


_PROCESSES = Refusal(
    "it belongs to OneFlow's own processes",
    "torchrun starts them, and torch.distributed has collectives",
)
_GLOBAL = Refusal(
    "a tensor is shared where that is written", "flow.to_global(x, placement, sbp) and flow.to_local(x)"
)
_READERS = Refusal(
    "OneFlow's readers of OFRecord, COCO and token files ran inside of its graphs",
    "read with a torch.utils.data.Dataset, and give the graph tensors",
)
_BUFFERS = Refusal(
    "tensors whose items have shapes of their own exist only for OneFlow's readers", "use a list of tensors"
)
_EMBEDDING = Refusal(
    "tables of embeddings beyond the memory of a device are a system of their own",
    "nn.Embedding or nn.EmbeddingBag hold a table in memory",
)
_QUANTISATION = Refusal("quantisation is PyTorch's own", "torch.ao.quantization, or the torchao package")
_VISION_OPS = Refusal("it is an op of torchvision", "torchvision.ops has nms, RoIAlign and deform_conv2d")
_MOCK = Refusal(
    "torch is PyTorch itself here", "remove the lines that switch it; `import torch` works as it is"
)
_OLD = Refusal("it belongs to OneFlow's first interface, of functions and job settings", "write an nn.Graph")
_PROFILER = Refusal(
    "profiling is done by other means", "graph.profile(...), torch.profiler or torch.cuda.nvtx"
)
_REMAT = Refusal("eager tensors are not dropped and computed again", "torch.utils.checkpoint")
_CUDNN = Refusal(
    "PyTorch sets cuDNN otherwise",
    "torch.backends.cudnn.benchmark, or graph.config.enable_cudnn_conv_heuristic_search_algo()",
)
_THREADS = Refusal(
    "ops are not given to worker threads", "Python's threading: each thread may call a graph of its own"
)
_RUNTIME = Refusal(
    "a plan is not saved by itself",
    "flow.save(graph, path) stores program and weights; what is compiled is kept in a cache on disk",
)
_TWO_HALVES = Refusal("capture and compilation are one step", "graph.compile(...)")
_PROTO = Refusal("programs are no protobuf messages", "graph.show(), graph.builds and print(graph)")
_AUTO_PARALLEL = Refusal(
    "nothing searches for a way to distribute a step",
    "config.enable_data_parallel() or enable_zero(), or placements and sbp",
)
_PROXIES = Refusal(
    "parameters and buffers in a graph are the module's own",
    "use the tensor; self.model.to(GraphModule) has a module's",
)

REFUSALS: dict[str, Refusal] = {
    "ComplexDoubleTensor": Refusal("it is a constructor of old", "torch.tensor(..., dtype=torch.complex128)"),
    "ComplexFloatTensor": Refusal("it is a constructor of old", "torch.tensor(..., dtype=torch.complex64)"),
    "FunctionConfig": _OLD,
    "_C": Refusal("it holds OneFlow's ops under private names", "flow.<name> or nn.functional.<name>"),
    "asyncs": _THREADS,
    "autograd.is_grad_enabled": Refusal("PyTorch has it elsewhere", "flow.is_grad_enabled()"),
    "backends.cudnn.enable_conv_heuristic_search_algo": _CUDNN,
    "backends.cudnn.enable_fused_normalization_add_relu": _CUDNN,
    "backends.cudnn.set_reserved_mem_mbytes": _CUDNN,
    "cuda.ComplexDoubleTensor": Refusal(
        "it is a constructor of old", "torch.tensor(..., dtype=torch.complex128)"
    ),
    "cuda.ComplexFloatTensor": Refusal(
        "it is a constructor of old", "torch.tensor(..., dtype=torch.complex64)"
    ),
    "deform_conv2d": _VISION_OPS,
    "distributed_partial_fc_sample": _PROCESSES,
    "env.destory_rdma": _PROCESSES,
    "env.init_rdma": _PROCESSES,
    "function_config": _OLD,
    "gen_tensor_buffer": _BUFFERS,
    "is_deprecated": _OLD,
    "mock_torch": _MOCK,
    "multiprocessing.unlink_all_shared_memory": Refusal(
        "PyTorch gives shared memory back by itself", "leave it out"
    ),
    "nms": _VISION_OPS,
    "nn.AllReduce": _PROCESSES,
    "nn.COCOReader": _READERS,
    "nn.CoinFlip": _READERS,
    "nn.CropMirrorNormalize": _READERS,
    "nn.DistributedPariticalFCSample": _PROCESSES,
    "nn.FakeQuantization": _QUANTISATION,
    "nn.GPTIndexedBinDataReader": _READERS,
    "nn.Graph._compiled_graph_proto": _PROTO,
    "nn.Graph._full_graph_proto": _PROTO,
    "nn.Graph._graph_proto": _PROTO,
    "nn.Graph.build_graph": _TWO_HALVES,
    "nn.Graph.enable_save_runtime_state_dict": _RUNTIME,
    "nn.Graph.finish_compile_and_init_runtime": _TWO_HALVES,
    "nn.Graph.finish_complie_and_init_runtime": _TWO_HALVES,
    "nn.Graph.load_runtime_state_dict": _RUNTIME,
    "nn.Graph.runtime_state_dict": _RUNTIME,
    "nn.Graph.runtime_state_dict_to": _RUNTIME,
    "nn.MinMaxObserver": _QUANTISATION,
    "nn.MovingAverageMinMaxObserver": _QUANTISATION,
    "nn.OFRecordBytesDecoder": _READERS,
    "nn.OFRecordImageDecoder": _READERS,
    "nn.OFRecordImageDecoderRandomCrop": _READERS,
    "nn.OFRecordImageGpuDecoderRandomCropResize": _READERS,
    "nn.OFRecordRawDecoder": _READERS,
    "nn.OFRecordReader": _READERS,
    "nn.OfrecordRawDecoder": _READERS,
    "nn.OfrecordReader": _READERS,
    "nn.QatConv1d": _QUANTISATION,
    "nn.QatConv2d": _QUANTISATION,
    "nn.QatConv3d": _QUANTISATION,
    "nn.Quantization": _QUANTISATION,
    "nn.RawReader": _READERS,
    "nn.functional.deform_conv2d": _VISION_OPS,
    "nn.graph.GraphConfig.enable_auto_parallel": _AUTO_PARALLEL,
    "nn.graph.GraphConfig.enable_auto_parallel_ignore_user_sbp_config": _AUTO_PARALLEL,
    "nn.graph.GraphConfig.enable_auto_parallel_sbp_collector": _AUTO_PARALLEL,
    "nn.graph.GraphConfig.enable_auto_parallel_trunk_algo": _AUTO_PARALLEL,
    "nn.graph.GraphConfig.proto": Refusal(
        "options are no protobuf message", "config has a method for each, or leave it out"
    ),
    "nn.graph.GraphConfig.set_auto_parallel_computation_cost_ratio": _AUTO_PARALLEL,
    "nn.graph.GraphConfig.set_auto_parallel_wait_time": _AUTO_PARALLEL,
    "nn.graph.GraphConfig.set_zero_redundancy_optimizer_mode": Refusal(
        "OneFlow gave it up for enable_zero", "config.enable_zero()"
    ),
    "nn.graph.GraphModule.debug": Refusal("a graph reports about all of its modules", "graph.debug(1)"),
    "nn.graph.GraphModule.prev_scope": _PROTO,
    "nn.graph.GraphModule.scope": _PROTO,
    "nn.graph.GraphModule.scope_context": _PROTO,
    "nn.graph.GraphTensor": _PROXIES,
    "nn.graph.Proxy": _PROXIES,
    "nn.graph.graph_block": _PROXIES,
    "nn.graph.graph_config": Refusal("it is a file of OneFlow's", "flow.nn.graph.GraphConfig"),
    "nn.image": _READERS,
    "one_embedding": _EMBEDDING,
    "oneflow_deprecate": _OLD,
    "profiler.profiler_start": _PROFILER,
    "profiler.profiler_stop": _PROFILER,
    "profiler.range_pop": _PROFILER,
    "profiler.range_push": _PROFILER,
    "record": _READERS,
    "remat": _REMAT,
    "roi_align": _VISION_OPS,
    "stateful_op": Refusal("it makes an op of OneFlow's own library", "torch.library.custom_op"),
    "tensor_buffer": _BUFFERS,
    "tensor_buffer_to_list_of_tensors": _BUFFERS,
    "tensor_buffer_to_tensor": _BUFFERS,
    "tensor_to_tensor_buffer": _BUFFERS,
    "utils.global_view.current_global_mode": _GLOBAL,
    "utils.global_view.global_mode": _GLOBAL,
    "utils.load_library": Refusal("libraries of OneFlow's ops do not run here", "torch.ops.load_library"),
}

_FUNCTION = "a tensor is a torch.Tensor, which has no such method"
_BY_FUNCTIONS = {
    "cast": "x.to(dtype), or flow.cast(x, dtype)",
    "gelu": "flow.gelu(x)",
    "in_top_k": "flow.in_top_k(targets, predictions, k)",
    "kaiming_normal_": "nn.init.kaiming_normal_(x)",
    "kaiming_uniform_": "nn.init.kaiming_uniform_(x)",
    "mish": "flow.mish(x)",
    "nms": "torchvision.ops.nms",
    "orthogonal_": "nn.init.orthogonal_(x)",
    "selu": "flow.selu(x)",
    "silu": "flow.silu(x)",
    "softplus": "flow.softplus(x)",
    "softsign": "flow.softsign(x)",
    "to_numpy": "x.numpy()",
    "trunc_normal_": "nn.init.trunc_normal_(x)",
    "xavier_normal_": "nn.init.xavier_normal_(x)",
    "xavier_uniform_": "nn.init.xavier_uniform_(x)",
}
_OF_OLD_GLOBAL = Refusal("OneFlow has renamed it", "x.to_global(placement, sbp), x.is_global")
_OFFLOAD = Refusal("tensors are not parked in the memory of the host", 'x.to("cpu") and x.to("cuda")')

# members of classes that are PyTorch's, where an access meets PyTorch's own AttributeError
ABSENT: dict[str, Refusal] = {
    **{f"Tensor.{name}": Refusal(_FUNCTION, instead) for name, instead in _BY_FUNCTIONS.items()},
    **{f"Tensor.{name}": _OF_OLD_GLOBAL for name in ("is_consistent", "to_consistent")},
    **{f"Tensor.{name}": _OFFLOAD for name in ("is_offloaded", "load", "offload")},
    "Tensor.is_lazy": Refusal(_FUNCTION, "in build() every tensor is recorded"),
    "nn.Module.to_consistent": _OF_OLD_GLOBAL,
    "optim.Optimizer.support_sparse": Refusal("gradients of embeddings are dense", "leave it out"),
}


def refusal(path: str) -> Refusal | None:
    """The refusal of a name, given without `oneflow.`, or of the namespace that holds it; None if there is none."""
    while path:
        if path in REFUSALS:
            return REFUSALS[path]
        path = path.rpartition(".")[0]
    return None


def refused(path: str, kind: type[_Error]) -> _Error | None:
    """The error of this kind for a name that is refused; None if it is not."""
    found = refusal(path)
    return None if found is None else kind(f"flow.{path} is not here: {found.reason}", hint=found.instead)
