"""Ops of torch whose kernels look at all that they are given: what does not fit is an error of torch's, in any build.

That is what `tests/stress/artifact_ops.py` has found of them, with numbers, sizes, strides and indices that no program
has. An op that is missing may still be safe; nobody has tried.
"""

from __future__ import annotations

from typing import Final

_FOREACH = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp expm1
    floor frac lerp lgamma log log10 log1p log2 max maximum minimum mm mul neg norm pow reciprocal round
    rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero
"""
_LINEAR_ALGEBRA = """
    _linalg_check_errors _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky
    cholesky_inverse cholesky_solve linalg_cholesky_ex linalg_cross linalg_eig linalg_householder_product
    linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_matrix_exp
    linalg_pinv linalg_qr linalg_solve_triangular linalg_vector_norm
"""
# without the orthogonal polynomials: their kernels take as many steps as a degree says, so that a call may never end
_SPECIAL = """
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx gammaln i0e i1 i1e log_ndtr modified_bessel_i0
    modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 ndtr ndtri scaled_modified_bessel_k0
    scaled_modified_bessel_k1 spherical_bessel_j0 xlog1py zeta
"""
_BACKWARD = """
    _fused_rms_norm_backward _masked_softmax_backward _prelu_kernel_backward
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward binary_cross_entropy_backward
    convolution_backward cummaxmin_backward diagonal_backward elu_backward
    fake_quantize_per_channel_affine_cachemask_backward fake_quantize_per_tensor_affine_cachemask_backward
    glu_backward glu_backward_jvp hardshrink_backward hardsigmoid_backward hardswish_backward
    hardtanh_backward huber_loss_backward leaky_relu_backward log_sigmoid_backward logit_backward
    masked_scatter_backward mish_backward mse_loss_backward rrelu_with_noise_backward select_backward
    sigmoid_backward silu_backward slice_backward smooth_l1_loss_backward soft_margin_loss_backward
    softplus_backward softshrink_backward tanh_backward unfold_backward upsample_bicubic2d_backward
    upsample_bilinear2d_backward upsample_linear1d_backward upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward upsample_trilinear3d_backward
"""
_RANDOM = """
    _sample_dirichlet _standard_gamma bernoulli binomial cauchy exponential geometric log_normal
    multinomial native_dropout normal poisson rand randint randint_like randn randn_like randperm uniform
"""
_OTHERS = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _add_relu _aminmax _amp_foreach_non_finite_check_and_unscale
    _amp_update_scale _assert_async _cdist_forward _conj _conj_copy _conj_physical _dirichlet_grad
    _efficientzerotensor _fused_rms_norm _int_mm _is_all_true _is_any_true _local_scalar_dense
    _log_softmax _masked_softmax _neg_view _pad_circular _prelu_kernel _reshape_copy _safe_softmax
    _softmax _standard_gamma_grad _to_copy _trilinear _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d abs acos acosh
    adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr
    affine_grid_generator alias alias_copy all allclose amax amin aminmax angle any arange argmax argmin
    as_strided as_strided_copy as_strided_scatter asin asinh atan atan2 atanh avg_pool2d avg_pool3d
    baddbmm bartlett_window binary_cross_entropy binary_cross_entropy_with_logits bitwise_and
    bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor block_diag bmm bucketize cat
    ceil celu channel_shuffle clamp clamp_max clamp_min clone col2im complex constant_pad_nd conv_tbc
    convolution copy copysign cos cosh count_nonzero cummax cummin cumprod cumsum deg2rad detach
    detach_copy diag_embed diagonal diagonal_copy diagonal_scatter digamma dist div dot elu embedding
    empty empty_like empty_strided eq equal erf erfc erfinv exp exp2 expand expand_copy expm1 eye
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask fill flip floor
    floor_divide fmax fmin fmod frac frexp full full_like gather gcd ge gelu geqrf glu glu_jvp
    grid_sampler_3d gt hann_window hardshrink hardsigmoid hardswish hardtanh heaviside histc histogram
    huber_loss hypot i0 igamma igammac im2col index index_add index_copy index_fill index_put index_reduce
    index_select is_non_overlapping_and_dense isin isinf isnan isneginf isposinf kthvalue ldexp le
    leaky_relu lerp lgamma lift lift_fresh lift_fresh_copy linear linspace log log10 log1p log2
    log_sigmoid_forward logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor
    logit logspace logsumexp lt masked_fill masked_scatter max max_pool2d_with_indices
    max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean median min minimum mish mm mode
    mse_loss mul multi_margin_loss multilabel_margin_loss_forward mv mvlgamma nan_to_num nanmedian nansum
    narrow_copy native_layer_norm ne neg new_empty new_empty_strided new_full new_ones new_zeros nextafter
    nll_loss2d_forward nll_loss_forward nonzero_static norm ones ones_like ormqr permute permute_copy
    pixel_shuffle pixel_unshuffle polar polygamma pow prod put rad2deg reciprocal reflection_pad1d
    reflection_pad2d reflection_pad3d relu remainder renorm repeat replication_pad1d
    replication_pad2d replication_pad3d roll rot90 round rsqrt rsub scalar_tensor scatter scatter_add
    scatter_reduce searchsorted select select_scatter sgn sigmoid sign signbit silu sin sinc sinh slice
    smooth_l1_loss soft_margin_loss softplus softshrink sort split split_with_sizes split_with_sizes_copy
    sqrt squeeze squeeze_copy stack std std_mean sub sum t t_copy take tan tanh threshold topk trace
    transpose transpose_copy triangular_solve tril tril_indices triu triu_indices trunc unbind unbind_copy
    unfold unfold_copy unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d var var_mean vdot view view_as_complex view_as_real view_copy where xlogy zero
    zeros zeros_like
"""
_UNSURE = """
    binary_cross_entropy binary_cross_entropy_backward convolution_backward log_sigmoid_backward mkldnn_rnn_layer
    mkldnn_rnn_layer_backward mse_loss_backward multilabel_margin_loss_forward native_batch_norm_backward
    native_layer_norm_backward nll_loss2d_forward nll_loss_forward rrelu_with_noise_backward randperm batch_norm_backward
    huber_loss multi_margin_loss soft_margin_loss nansum native_dropout repeat_interleave _softmax_backward_data
    _log_softmax_backward_data _foreach_pow ldexp floor_divide _fft_c2r _native_multi_head_attention
    _transformer_encoder_layer_fwd
"""
_OURS = "masked_sum indexed_sum taken laid_out"

SAFE_OPS: Final = frozenset(
    {
        *(f"aten::_foreach_{name}" for name in _FOREACH.split()),
        *(f"aten::special_{name}" for name in _SPECIAL.split()),
        *(
            f"aten::{name}"
            for names in (_LINEAR_ALGEBRA, _BACKWARD, _RANDOM, _OTHERS)
            for name in names.split()
        ),
        *(f"monograph::{name}" for name in _OURS.split()),
    }
)

# Ops whose results torch infers wrongly for arguments that make no sense: they are compared when they have run.
OF_UNSURE_FORM: Final = frozenset({"monograph::masked_sum", *(f"aten::{name}" for name in _UNSURE.split())})
SIZE_UNKNOWN: Final = frozenset({("aten::mkldnn_rnn_layer", 3)})  # the workspace, whose size nobody reports
