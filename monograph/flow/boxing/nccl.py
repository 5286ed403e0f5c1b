"""Settings of OneFlow's collectives. They are taken, and have no effect: which are sent together is for a pass to say."""

from __future__ import annotations


def _set(value: object = True) -> None:
    """Has no effect: collectives are torch's, and a graph puts those together that can be."""


allow_fuse_all_gather = _set
allow_fuse_all_reduce = _set
allow_fuse_broadcast = _set
allow_fuse_mixed_ops = _set
allow_fuse_reduce = _set
allow_fuse_reduce_scatter = _set
disable_group_boxing_by_dst_parallel = _set
enable_all_to_all = _set
enable_use_buffer_to_fuse_all_reduce = _set
enable_use_compute_stream = _set
set_fusion_max_ops_num = _set
set_fusion_threshold_mbytes = _set
set_stream_num = _set
