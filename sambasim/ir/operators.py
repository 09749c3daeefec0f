"""The table of operators that a PEF may hold, each with its kind, and a product with its FLOPs, by a formula of
`operator_flops.py` or one in its row: an allow-list by full name, as a PEF comes from a file. A test compares every row
with the schemas of torch, and `tests/operators` says for each operator without a row why it has none: it changes an
argument, has sizes that depend on values, gives Python numbers, addresses memory or files, or is for other tensors or
devices. `index.Tensor` and `one_hot` are in: capture refuses a model where their shapes depend on data. So is
`_ctc_loss.Tensor`, the second result of which may be smaller than its type says: only its backward reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from types import MappingProxyType

from sambasim.ir import operator_flops as count
from sambasim.ir.graph import Node
from sambasim.ir.types import TensorType
from sambasim.optimizers import KINDS


class OperatorKind(StrEnum):
    """What an operator is, for tables, for grouping, and for what a device does with it."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    FACTORIZATION = "factorization"
    FOURIER = "fourier"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    SCAN = "scan"
    NORMALIZATION = "normalization"
    SOFTMAX = "softmax"
    POOLING = "pooling"
    RESIZE = "resize"
    LOSS = "loss"
    VIEW = "view"
    COPY = "copy"
    INDEXING = "indexing"
    CREATION = "creation"
    RANDOM = "random"
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    MEMORY = "memory"  # made when a program is loaded; no PEF may hold it
    GENERATOR = "generator"  # the state of torch's generator of random numbers
    CHECK = "check"  # an assertion of the model, which raises if it does not hold


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known about operators. `draws_random_numbers` means that they may advance torch's generator."""

    kind: OperatorKind
    names: tuple[str, ...]
    flops: count.Flops | None = None
    draws_random_numbers: bool = False


def _aten(
    kind: OperatorKind,
    names: str,
    flops: count.Flops | None = None,
    *,
    draws_random_numbers: bool = False,
    prefix: str = "",
    overloads: str = "default",
) -> Operator:
    """`"relu add.Tensor|Scalar"` are aten.relu.default, by the default `overloads`, aten.add.Tensor and .Scalar."""
    split = (name.partition(".") for name in names.split())
    full = (f"aten.{prefix}{name}.{one}" for name, _, these in split for one in (these or overloads).split("|"))
    return Operator(kind, tuple(full), flops, draws_random_numbers)


ASSERTION = "check.true"

TABLE = (
    _aten(OperatorKind.MATMUL, """
        mm bmm matmul mv dot vdot inner linear linalg_matmul linalg_vecdot _int_mm _weight_int8pack_mm _grouped_mm
    """, count.product(0)),
    _aten(OperatorKind.MATMUL, "addmm baddbmm addmv _addmm_activation", count.product(1)),
    # Of two lists of matrices.
    _aten(OperatorKind.MATMUL, "_foreach_mm", lambda of: sum(
        2 * prod(a) * b[-1] for a, b in zip(of.shapes(0), of.shapes(1), strict=False) if b
    )),
    # 2 b m k n, for the operands [b, m, k] and [b, k, n].
    _aten(OperatorKind.MATMUL, "addbmm", lambda of: 2 * prod(of.shape(1)) * of.extent(2, -1)),
    _aten(OperatorKind.MATMUL, "outer ger kron", lambda of: of.result),
    _aten(OperatorKind.MATMUL, "einsum", count.einsum),
    # 2 for each element of the result and of the dimensions that are summed over.
    _aten(OperatorKind.MATMUL, "tensordot", lambda of: (
        2 * of.result * prod(of.extent(0, dimension) for dimension in of.integers(2))
    )),
    # A product as large as the forward's for each gradient.
    _aten(OperatorKind.MATMUL, "linear_backward", lambda of: of.gradients(3) * 2 * prod(of.shape(0)) * of.extent(2, 0)),
    _aten(OperatorKind.MATMUL, "_trilinear", count.trilinear),
    # x W y, with 3 for each element of W.
    _aten(OperatorKind.MATMUL, "bilinear", lambda of: 3 * of.result * prod(of.shape(2)[1:])),
    # Subtract, raise to a power and add, for each coordinate of each pair of rows.
    _aten(OperatorKind.MATMUL, "cdist _cdist_forward _cdist_backward _euclidean_dist", lambda of: (
        3 * of.result * of.extent(0, -1)
    )),
    _aten(OperatorKind.CONVOLUTION, "convolution _convolution", lambda of: (
        count.convolution(of, transposed=of.argument(6) is True)
    )),
    _aten(OperatorKind.CONVOLUTION, """
        conv1d.default|padding conv2d.default|padding conv3d.default|padding _slow_conv2d_forward slow_conv3d_forward
        slow_conv_dilated2d slow_conv_dilated3d mkldnn_convolution
    """, count.convolution),
    # Its weight is [steps, in, out].
    _aten(OperatorKind.CONVOLUTION, "conv_tbc", lambda of: 2 * of.result * prod(of.shape(1)[:2])),
    _aten(OperatorKind.CONVOLUTION, """
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input slow_conv_transpose2d slow_conv_transpose3d
    """, lambda of: count.convolution(of, transposed=True)),
    _aten(OperatorKind.CONVOLUTION, "convolution_backward", count.convolution_backward(10)),
    _aten(OperatorKind.CONVOLUTION, "_slow_conv2d_backward.output_mask", count.convolution_backward(6)),
    _aten(OperatorKind.ATTENTION, """
        scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu
    """, count.attention(0, 1, 1), draws_random_numbers=True),
    # The scores once more, and the gradients of weights, values, queries and keys.
    _aten(OperatorKind.ATTENTION, "_scaled_dot_product_flash_attention_for_cpu_backward", count.attention(1, 3, 2)),
    _aten(OperatorKind.ATTENTION, "_transformer_encoder_layer_fwd", count.token_layer(0, 3, 5, 14, 16)),
    _aten(OperatorKind.ATTENTION, "_native_multi_head_attention", count.token_layer(1, 5, 7)),
    # Every weight matrix of every layer and direction.
    _aten(OperatorKind.RECURRENT, "lstm.input gru.input rnn_tanh.input rnn_relu.input", lambda of: (
        2 * of.rows(0) * sum(prod(shape) for shape in of.shapes(2) if len(shape) == 2)
    ), draws_random_numbers=True),
    _aten(OperatorKind.RECURRENT, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", count.recurrent(1, 2, 3)),
    _aten(OperatorKind.RECURRENT, "mkldnn_rnn_layer", count.recurrent(1, 1, 2)),
    _aten(OperatorKind.RECURRENT, "mkldnn_rnn_layer_backward", count.recurrent(2, 1, 2)),
    _aten(OperatorKind.FACTORIZATION, """
        linalg_cholesky linalg_cholesky_ex cholesky linalg_inv linalg_inv_ex inverse linalg_solve linalg_solve_ex
        _linalg_solve_ex linalg_solve_triangular triangular_solve linalg_lu linalg_lu_factor linalg_lu_factor_ex
        linalg_lu_solve lu_unpack linalg_det _linalg_det det logdet linalg_slogdet _linalg_slogdet slogdet linalg_svd
        _linalg_svd linalg_svdvals linalg_qr linalg_eigh _linalg_eigh linalg_eigvalsh
        linalg_pinv.default|atol_rtol_tensor linalg_matrix_exp matrix_exp _compute_linear_combination cholesky_solve
        _cholesky_solve_helper cholesky_inverse linalg_eig _linalg_eigvals geqrf ormqr linalg_householder_product
        linalg_ldl_factor_ex linalg_ldl_solve
    """, count.factorization),
    _aten(OperatorKind.FOURIER, "_fft_r2c _fft_c2c _fft_c2r", count.fourier),
    _aten(OperatorKind.POINTWISE, """
        add.Tensor|Scalar sub.Tensor|Scalar rsub.Tensor|Scalar mul.Tensor|Scalar
        div.Tensor|Scalar|Tensor_mode|Scalar_mode true_divide.Tensor|Scalar floor_divide.default|Scalar
        remainder.Tensor|Scalar|Scalar_Tensor fmod.Tensor|Scalar pow.Tensor_Tensor|Tensor_Scalar|Scalar
        float_power.Tensor_Tensor|Tensor_Scalar|Scalar neg positive abs sign sgn signbit reciprocal square sqrt rsqrt
        copysign.Tensor|Scalar ceil floor round.default|decimals trunc fix frac nan_to_num exp exp2 expm1 log log2 log10
        log1p logit logaddexp logaddexp2 xlogy.Tensor|Scalar_Self|Scalar_Other sin cos tan asin acos atan atan2 sinh
        cosh tanh asinh acosh atanh sinc hypot deg2rad rad2deg erf erfc erfinv lgamma digamma polygamma i0 special_entr
        special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_ndtr
        special_xlog1py.default|self_scalar|other_scalar special_zeta.default|self_scalar|other_scalar special_expit
        lerp.Tensor|Scalar addcmul addcdiv addr cross linalg_cross heaviside ldexp.Tensor nextafter maximum minimum fmax
        fmin max.other min.other clamp.default|Tensor clamp_min.default|Tensor clamp_max.default|Tensor
        clip.default|Tensor eq.Tensor|Scalar ne.Tensor|Scalar lt.Tensor|Scalar le.Tensor|Scalar gt.Tensor|Scalar
        ge.Tensor|Scalar isclose isnan isinf isfinite isposinf isneginf isin.Tensor_Tensor|Tensor_Scalar|Scalar_Tensor
        logical_and logical_or logical_xor logical_not bitwise_and.Tensor|Scalar|Scalar_Tensor
        bitwise_or.Tensor|Scalar|Scalar_Tensor bitwise_xor.Tensor|Scalar|Scalar_Tensor bitwise_not
        bitwise_left_shift.Tensor|Tensor_Scalar|Scalar_Tensor bitwise_right_shift.Tensor|Tensor_Scalar|Scalar_Tensor
        __and__.Tensor|Scalar __or__.Tensor|Scalar __xor__.Tensor|Scalar __lshift__.Scalar|Tensor
        __rshift__.Scalar|Tensor where.self|ScalarSelf|ScalarOther|Scalar masked_fill.Scalar|Tensor relu relu6
        leaky_relu elu selu celu gelu silu mish sigmoid hardtanh hardsigmoid hardswish hardshrink softshrink softplus
        threshold log_sigmoid log_sigmoid_forward glu prelu _prelu_kernel threshold_backward leaky_relu_backward
        elu_backward gelu_backward silu_backward mish_backward sigmoid_backward tanh_backward hardtanh_backward
        hardsigmoid_backward hardswish_backward hardshrink_backward softshrink_backward softplus_backward
        log_sigmoid_backward glu_backward _prelu_kernel_backward logit_backward rrelu_with_noise_backward
        native_dropout_backward _masked_scale complex polar angle _conj_physical conj_physical frexp.Tensor gcd lcm
        igamma igammac mvlgamma _dirichlet_grad _standard_gamma_grad _add_relu.Tensor|Scalar special_airy_ai
        special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
        special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    """),
    _aten(OperatorKind.POINTWISE, """
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
        legendre_polynomial_p
    """, prefix="special_", overloads="default|x_scalar|n_scalar"),
    _aten(OperatorKind.POINTWISE, """
        abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round
        rsqrt sigmoid sign sin sinh sqrt tan tanh trunc add.Scalar|List|ScalarList|Tensor sub.Scalar|List|ScalarList
        mul.Scalar|List|ScalarList|Tensor div.Scalar|List|ScalarList|Tensor addcdiv.Scalar|ScalarList|Tensor
        addcmul.Scalar|ScalarList|Tensor clamp_max.Scalar|List|ScalarList clamp_min.Scalar|List|ScalarList
        lerp.Scalar|List|ScalarList maximum.Scalar|List|ScalarList minimum.Scalar|List|ScalarList
        pow.Scalar|List|ScalarList|ScalarAndTensor
    """, prefix="_foreach_"),
    _aten(OperatorKind.REDUCTION, """
        sum.default|dim_IntList sum_to_size mean.default|dim nansum nanmean prod.default|dim_int trace max.default|dim
        min.default|dim amax amin aminmax argmax argmin median.default|dim nanmedian.default|dim mode kthvalue
        all.default|dim|dims _is_all_true _is_any_true any.default|dim|dims count_nonzero.default|dim_IntList
        var.default|dim|correction var_mean.default|dim|correction std.default|dim|correction
        std_mean.default|dim|correction norm.Scalar|ScalarOpt_dim|ScalarOpt_dtype|ScalarOpt_dim_dtype linalg_vector_norm
        linalg_matrix_norm.default|str_ord linalg_norm.default|ord_str frobenius_norm.dim norm_except_dim logsumexp dist
        pairwise_distance cosine_similarity quantile.default|scalar trapezoid.dx histc histogram.bin_ct|bins_tensor
        _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _aminmax.default|dim
        linalg__powsum _foreach_max _foreach_norm.Scalar _foreach_powsum.Scalar _pdist_forward _pdist_backward
    """),
    _aten(OperatorKind.SCAN, """
        cumsum cumprod cumprod_backward cummax cummin cummaxmin_backward logcumsumexp _logcumsumexp diff
    """),
    _aten(OperatorKind.SOFTMAX, """
        softmax.int _softmax log_softmax.int _log_softmax _safe_softmax _softmax_backward_data
        _log_softmax_backward_data _masked_softmax _masked_softmax_backward
    """),
    _aten(OperatorKind.NORMALIZATION, """
        batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit.no_stats
        _native_batch_norm_legit_no_training layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm
        native_group_norm instance_norm renorm _weight_norm _weight_norm_interface native_batch_norm_backward
        native_layer_norm_backward _fused_rms_norm_backward native_group_norm_backward _weight_norm_interface_backward
        _batch_norm_no_update _batch_norm_with_update_functional batch_norm_backward glu_jvp glu_backward_jvp
        fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fused_moving_avg_obs_fq_helper_functional
        _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward
        _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward
    """),
    _aten(OperatorKind.POOLING, """
        avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool1d_with_indices
        max_pool2d_with_indices max_pool3d_with_indices adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        adaptive_max_pool3d_backward max_unpool2d max_unpool3d fractional_max_pool2d fractional_max_pool2d_backward
        fractional_max_pool3d fractional_max_pool3d_backward
    """),
    _aten(OperatorKind.RESIZE, """
        upsample_nearest1d.default|vec upsample_nearest2d.default|vec upsample_nearest3d.default|vec
        _upsample_nearest_exact1d.default|vec _upsample_nearest_exact2d.default|vec
        _upsample_nearest_exact3d.default|vec pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
        upsample_linear1d.default|vec upsample_linear1d_backward upsample_bilinear2d.default|vec
        upsample_bilinear2d_backward _upsample_bilinear2d_aa.default|vec _upsample_bilinear2d_aa_backward
        affine_grid_generator affine_grid_generator_backward grid_sampler grid_sampler_2d grid_sampler_2d_backward
        upsample_trilinear3d.default|vec upsample_trilinear3d_backward grid_sampler_3d grid_sampler_3d_backward
        upsample_bicubic2d.default|vec upsample_bicubic2d_backward _upsample_bicubic2d_aa.default|vec
        _upsample_bicubic2d_aa_backward _upsample_lanczos2d_aa _upsample_lanczos2d_aa_backward
        _grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward
    """),
    _aten(OperatorKind.COPY, """
        pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
        replication_pad3d im2col reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward col2im resolve_conj resolve_neg
        clone copy contiguous _to_copy to.dtype|dtype_layout|device|other type_as lift_fresh_copy cat concat concatenate
        stack hstack vstack dstack column_stack row_stack block_diag cartesian_prod pad_sequence repeat
        repeat_interleave.self_int tile flip fliplr flipud roll rot90 tril triu diag diag_embed diagflat select_scatter
        slice_scatter diagonal_scatter select_backward slice_backward diagonal_backward trace_backward unfold_backward
        value_selecting_reduction_backward _stack _chunk_cat lift _foreach_clone _foreach_copy alias_copy detach_copy
        diagonal_copy expand_copy permute_copy select_copy.int slice_copy.Tensor split_copy.Tensor split_with_sizes_copy
        squeeze_copy.default|dim|dims t_copy transpose_copy.int unbind_copy.int unfold_copy unsqueeze_copy
        view_copy.default|dtype view_as_complex_copy view_as_real_copy narrow_copy _conj_copy _neg_view_copy
        _reshape_copy as_strided_copy as_strided_scatter _transform_bias_rescale_qkv
    """),
    _aten(OperatorKind.LOSS, """
        cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward mse_loss l1_loss
        smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss
        soft_margin_loss hinge_embedding_loss margin_ranking_loss cosine_embedding_loss triplet_margin_loss
        multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nll_loss_backward nll_loss2d_backward
        mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
        soft_margin_loss_backward multi_margin_loss_backward multilabel_margin_loss_backward _ctc_loss.default|Tensor
        _ctc_loss_backward.default|Tensor
    """),
    _aten(OperatorKind.VIEW, """
        view.default|dtype view_as _unsafe_view reshape reshape_as flatten.using_ints ravel unflatten.int t mT numpy_T
        transpose.int swapaxes swapdims permute movedim.int|intlist moveaxis.int|intlist unsqueeze
        squeeze.default|dim|dims expand expand_as broadcast_to broadcast_tensors slice.Tensor select.int narrow
        unbind.int diagonal unfold alias detach lift_fresh split.Tensor|sizes split_with_sizes chunk
        tensor_split.sections|indices unsafe_split.Tensor unsafe_split_with_sizes unsafe_chunk atleast_1d atleast_2d
        atleast_3d meshgrid.default|indexing view_as_real view_as_complex real imag _conj conj _neg_view as_strided
    """),
    _aten(OperatorKind.INDEXING, """
        embedding index.Tensor _unsafe_index.Tensor index_select index_copy index_fill.int_Scalar|int_Tensor gather take
        take_along_dim put scatter.src|value|reduce|value_reduce masked_scatter masked_scatter_backward one_hot
        nonzero_static sort.default|stable argsort.default|stable msort topk bucketize.Tensor|Scalar
        searchsorted.Tensor|Scalar index_put _unsafe_index_put index_add index_reduce scatter_add scatter_reduce.two
        index_select_backward gather_backward _index_put_impl _unsafe_masked_index _unsafe_masked_index_put_accumulate
        embedding_renorm segment_reduce _segment_reduce_backward embedding_dense_backward
        embedding_bag.default|padding_idx _embedding_bag _embedding_bag_forward_only _embedding_bag_backward
        _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
    """),
    _aten(OperatorKind.CREATION, """
        zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill.Scalar|Tensor zero
        empty.memory_format empty_like empty_permuted new_empty new_empty_strided scalar_tensor
        arange.default|start|start_step linspace.default|Tensor_Tensor|Tensor_Scalar|Scalar_Tensor
        logspace.default|Tensor_Tensor|Tensor_Scalar|Scalar_Tensor eye.default|m tril_indices triu_indices
        hann_window.default|periodic hamming_window.default|periodic|periodic_alpha|periodic_alpha_beta
        bartlett_window.default|periodic blackman_window.default|periodic kaiser_window.default|periodic|beta
        range.default|step fft_fftfreq fft_rfftfreq empty_strided _foreach_zero _efficientzerotensor
        _new_zeros_with_same_feature_meta
    """),
    _aten(OperatorKind.RANDOM, """
        dropout native_dropout alpha_dropout feature_dropout feature_alpha_dropout rrelu rrelu_with_noise_functional
        bernoulli.default|p|Tensor multinomial poisson binomial rand.default|generator rand_like.default|generator
        randn.default|generator randn_like.default|generator randint.default|low|generator|low_generator
        randint_like.default|low_dtype|Tensor|generator|Tensor_generator|low_generator_dtype randperm.default|generator
        normal.Tensor_float|float_Tensor|Tensor_Tensor|float_float normal_functional uniform exponential geometric
        log_normal cauchy random.default|from|to _standard_gamma _sample_dirichlet
    """, draws_random_numbers=True),
    Operator(OperatorKind.OPTIMIZER, (*(f"opt.{kind}" for kind in KINDS), "opt.square_sums", "opt.total_norm")),
    Operator(OperatorKind.COLLECTIVE, (
        "comm.reduce_scatter", "comm.all_gather", "comm.all_reduce", "comm.broadcast", "comm.send", "comm.recv",
        "comm.shard", "comm.index", "comm.copy",
    )),
    Operator(OperatorKind.MEMORY, ("memory.release",)),
    Operator(OperatorKind.GENERATOR, ("random.state", "random.set_state")),
    Operator(OperatorKind.CHECK, (ASSERTION,)),
)  # fmt: skip

OPERATORS: Mapping[str, Operator] = MappingProxyType({name: operator for operator in TABLE for name in operator.names})
"""By full name: `aten.addmm.default`, `opt.adamw`, `comm.reduce_scatter`."""

_OTHERWISE = "isin cross linalg_cross glu positive conj_physical _conj_physical _standard_gamma _prelu_kernel prelu"
_ON_ELEMENTS = "copy clone _to_copy fill.Scalar zero zeros_like ones_like full_like scalar_tensor"

ELEMENTWISE = frozenset({
    *_aten(OperatorKind.COPY, _ON_ELEMENTS).names,
    *(name for one in TABLE if one.kind is OperatorKind.POINTWISE for name in one.names
      if name.split(".")[1] not in _OTHERWISE.split() and not name.startswith("aten._foreach_")),
})  # fmt: skip
"""Those of which an element of the result depends on the same element of each operand alone."""

NUMBERS = frozenset(f"number.{name}" for name in ["add", "sub", "mul", "truediv", "pow", "neg", "sym_min", "sym_max"])
"""Arithmetic of Python's numbers, in the update of an optimizer: the names of functions of `operator` and of torch."""


def flops_of(node: Node, types: Mapping[str, TensorType]) -> int:
    """Of a product; 0 for another operator."""
    formula = OPERATORS[node.operator].flops
    return 0 if formula is None else formula(count.Operands(node, types))
