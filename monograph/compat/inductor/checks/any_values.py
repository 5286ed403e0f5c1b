"""Ops of torch that take any values: what they refuse is a form, which is known before a step runs."""

from __future__ import annotations

from typing import Final

_PRODUCTS = """
    mm addmm bmm baddbmm dot vdot mv addmv _int_mm convolution convolution_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    _cdist_forward _cdist_backward _fft_r2c _fft_c2r _fft_c2c mkldnn_rnn_layer mkldnn_rnn_layer_backward
"""
_SAMPLES = """
    native_dropout native_dropout_backward rand randn rand_like randn_like randint randint_like randperm uniform normal_functional
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_linear1d upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
    upsample_trilinear3d upsample_trilinear3d_backward grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward
    grid_sampler_3d_backward
"""
_REDUCTIONS = """
    sum mean amax amin argmax argmin var std var_mean std_mean logsumexp linalg_vector_norm norm all any
    sort topk cumsum cumprod logcumsumexp cummax cummin
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
    adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
    cudnn_batch_norm cudnn_batch_norm_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _fused_rms_norm _fused_rms_norm_backward
    soft_margin_loss_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss
    huber_loss_backward binary_cross_entropy_with_logits
    elu_backward glu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_forward log_sigmoid_backward mish_backward sigmoid_backward silu_backward
    softplus_backward softshrink_backward tanh_backward threshold_backward gelu_backward _prelu_kernel_backward
    rrelu_with_noise_backward logit_backward
"""
_COPIES = """
    clone copy view_as_real view_as_complex complex cat stack constant_pad_nd slice_backward select_backward
    slice_scatter select_scatter diagonal_scatter as_strided_scatter flip roll repeat tril triu _to_copy _unsafe_view
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d reflection_pad1d_backward
    reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward
    full full_like zeros zeros_like ones ones_like empty empty_like empty_strided new_zeros new_ones new_full new_empty
    scalar_tensor arange masked_fill where
"""
_OVERLOADS = "bernoulli.p bernoulli.default bernoulli_.float"  # others take tensors of chances
_OURS = "linear recurrent_layer recurrent_layer_backward unrolled_layer unrolled_layer_backward laid_out"

TAKE_ANY_VALUES: Final = frozenset(
    {
        *(f"aten::{name}" for names in (_PRODUCTS, _SAMPLES, _REDUCTIONS, _COPIES) for name in names.split()),
        *(f"aten::{name}" for name in _OVERLOADS.split()),
        *(f"monograph::{name}" for name in _OURS.split()),
    }
)
LIBRARY_KERNELS: Final = frozenset(
    _PRODUCTS.split()
)  # of aten: products, convolutions, attention, Fourier transforms
SPACES_OF_ANY_VALUES: Final = ("mkldnn", "mkl")  # all of their ops do
