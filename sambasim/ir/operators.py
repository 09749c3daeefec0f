"""The table of operators that a PEF may hold: an allow-list by full name, as a PEF comes from a file. A test compares
every row with the schemas of torch, and `tests/operators` says for each operator without a row why it has none: it
changes an argument, has sizes that depend on values, gives Python numbers, addresses memory or files, or is for other
tensors or devices. `index.Tensor` and `one_hot` are in: capture refuses a model where their shapes depend on data. So
is `_ctc_loss.Tensor`, the second result of which may be smaller than its type says: only its backward reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from sambasim.ir import operator_flops as count
from sambasim.optimizers import OPTIMIZERS


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
    """What is known about operators. `flops` is the formula of a product; `draws_random_numbers` means that they may
    advance torch's generator."""

    kind: OperatorKind
    names: tuple[str, ...]
    flops: count.Flops | None = None
    draws_random_numbers: bool = False


ASSERTION = "check.true"


def _aten(names: str, prefix: str = "", overloads: str = "default") -> tuple[str, ...]:
    """`"relu add.Tensor|Scalar"` -> `("aten.relu.default", "aten.add.Tensor", "aten.add.Scalar")`. Names without
    overloads have `overloads`."""
    parts = (name.partition(".") for name in names.split())
    return tuple(f"aten.{prefix}{name}.{one}" for name, _, own in parts for one in (own or overloads).split("|"))


PRODUCTS = (
    Operator(OperatorKind.MATMUL, _aten("""
        mm bmm matmul mv dot vdot inner linear linalg_matmul linalg_vecdot _int_mm _weight_int8pack_mm _grouped_mm
    """), count.product(0)),
    Operator(OperatorKind.MATMUL, _aten("_foreach_mm"), count.products),
    Operator(OperatorKind.MATMUL, _aten("addbmm"), count.summed_products),
    Operator(OperatorKind.MATMUL, _aten("addmm baddbmm addmv _addmm_activation"), count.product(1)),
    Operator(OperatorKind.MATMUL, _aten("outer ger kron"), count.each_result(1)),
    Operator(OperatorKind.MATMUL, _aten("einsum"), count.einsum),
    Operator(OperatorKind.MATMUL, _aten("tensordot"), count.tensordot),
    Operator(OperatorKind.MATMUL, _aten("linear_backward"), count.linear_backward),
    Operator(OperatorKind.MATMUL, _aten("_trilinear"), count.trilinear),
    Operator(OperatorKind.MATMUL, _aten("bilinear"), count.bilinear),
    Operator(OperatorKind.MATMUL, _aten("cdist _cdist_forward _cdist_backward _euclidean_dist"), count.distances),
    Operator(OperatorKind.CONVOLUTION, _aten("convolution _convolution"), count.convolution),
    Operator(OperatorKind.CONVOLUTION, _aten("""
        conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding
        _slow_conv2d_forward slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d
        mkldnn_convolution
    """), count.plain_convolution),
    Operator(OperatorKind.CONVOLUTION, _aten("conv_tbc"), count.convolution_of_steps),
    Operator(OperatorKind.CONVOLUTION, _aten("""
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input slow_conv_transpose2d slow_conv_transpose3d
    """), count.transposed_convolution),
    Operator(OperatorKind.CONVOLUTION, _aten("convolution_backward"), count.convolution_backward(10)),
    Operator(OperatorKind.CONVOLUTION, _aten("_slow_conv2d_backward.output_mask"), count.convolution_backward(6)),
    Operator(OperatorKind.ATTENTION, _aten("""
        scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu
    """), count.attention, draws_random_numbers=True),
    Operator(OperatorKind.ATTENTION, _aten("""
        _scaled_dot_product_flash_attention_for_cpu_backward
    """), count.attention_backward),
    Operator(OperatorKind.ATTENTION, _aten("_transformer_encoder_layer_fwd"), count.encoder_layer),
    Operator(OperatorKind.ATTENTION, _aten("_native_multi_head_attention"), count.multi_head_attention),
    Operator(OperatorKind.RECURRENT, _aten("""
        lstm.input gru.input rnn_tanh.input rnn_relu.input
    """), count.recurrent, draws_random_numbers=True),
    Operator(OperatorKind.RECURRENT, _aten("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"), count.recurrent_cell),
    Operator(OperatorKind.RECURRENT, _aten("mkldnn_rnn_layer"), count.recurrent_layer(1)),
    Operator(OperatorKind.RECURRENT, _aten("mkldnn_rnn_layer_backward"), count.recurrent_layer(2)),
)  # fmt: skip

FACTORIZATIONS = (
    Operator(OperatorKind.FACTORIZATION, _aten("""
        linalg_cholesky linalg_cholesky_ex cholesky linalg_inv linalg_inv_ex inverse
        linalg_solve linalg_solve_ex _linalg_solve_ex linalg_solve_triangular triangular_solve
        linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve lu_unpack
        linalg_det _linalg_det det logdet linalg_slogdet _linalg_slogdet slogdet
        linalg_svd _linalg_svd linalg_svdvals linalg_qr linalg_eigh _linalg_eigh linalg_eigvalsh
        linalg_pinv linalg_pinv.atol_rtol_tensor linalg_matrix_exp matrix_exp _compute_linear_combination
        cholesky_solve _cholesky_solve_helper cholesky_inverse linalg_eig _linalg_eigvals
        geqrf ormqr linalg_householder_product linalg_ldl_factor_ex linalg_ldl_solve
    """), count.factorization),
)  # fmt: skip

FOURIER = (
    Operator(OperatorKind.FOURIER, _aten("_fft_r2c _fft_c2c _fft_c2r"), count.fourier),
)  # fmt: skip

POINTWISE = (
    Operator(OperatorKind.POINTWISE, _aten("""
        add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar
        div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor true_divide.Scalar
        floor_divide floor_divide.Scalar remainder.Tensor remainder.Scalar
        remainder.Scalar_Tensor fmod.Tensor fmod.Scalar
        pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar
        float_power.Tensor_Tensor float_power.Tensor_Scalar float_power.Scalar
        neg positive abs sign sgn signbit reciprocal square sqrt rsqrt copysign.Tensor copysign.Scalar
        ceil floor round round.decimals trunc fix frac nan_to_num
        exp exp2 expm1 log log2 log10 log1p logit logaddexp logaddexp2 xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other
        sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh sinc hypot deg2rad rad2deg
        erf erfc erfinv lgamma digamma polygamma i0 special_entr special_erfcx special_i0e special_i1 special_i1e
        special_log_ndtr special_ndtri special_ndtr special_xlog1py special_zeta special_expit
        lerp.Tensor lerp.Scalar addcmul addcdiv addr cross linalg_cross heaviside ldexp.Tensor nextafter
        maximum minimum fmax fmin max.other min.other
        clamp clamp.Tensor clamp_min clamp_min.Tensor clamp_max clamp_max.Tensor clip clip.Tensor
        eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar
        gt.Tensor gt.Scalar ge.Tensor ge.Scalar isclose isnan isinf isfinite isposinf isneginf
        isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor
        logical_and logical_or logical_xor logical_not
        bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar
        bitwise_not bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
        bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
        __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar
        __lshift__.Scalar __rshift__.Scalar
        where.self where.ScalarSelf where.ScalarOther where.Scalar masked_fill.Scalar masked_fill.Tensor
        relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid hardtanh hardsigmoid hardswish hardshrink softshrink
        softplus threshold log_sigmoid log_sigmoid_forward glu prelu _prelu_kernel
        threshold_backward leaky_relu_backward elu_backward gelu_backward silu_backward mish_backward sigmoid_backward
        tanh_backward hardtanh_backward hardsigmoid_backward hardswish_backward hardshrink_backward softshrink_backward
        softplus_backward log_sigmoid_backward glu_backward _prelu_kernel_backward logit_backward
        rrelu_with_noise_backward native_dropout_backward _masked_scale
        complex polar angle _conj_physical conj_physical
        frexp.Tensor gcd lcm igamma igammac mvlgamma _dirichlet_grad _standard_gamma_grad _add_relu.Tensor|Scalar
        __lshift__.Tensor __rshift__.Tensor bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
        bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Scalar_Tensor
        special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
        special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
        special_xlog1py.self_scalar|other_scalar special_zeta.self_scalar|other_scalar
    """)),
    Operator(OperatorKind.POINTWISE, _aten("""
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
        shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
        hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
    """, "special_", "default|x_scalar|n_scalar")),
    Operator(OperatorKind.POINTWISE, _aten("""
        abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round
        rsqrt sigmoid sign sin sinh sqrt tan tanh trunc
        add.Scalar|List|ScalarList|Tensor sub.Scalar|List|ScalarList
        mul.Scalar|List|ScalarList|Tensor div.Scalar|List|ScalarList|Tensor
        addcdiv.Scalar|ScalarList|Tensor addcmul.Scalar|ScalarList|Tensor
        clamp_max.Scalar|List|ScalarList clamp_min.Scalar|List|ScalarList lerp.Scalar|List|ScalarList
        maximum.Scalar|List|ScalarList minimum.Scalar|List|ScalarList pow.Scalar|List|ScalarList|ScalarAndTensor
    """, "_foreach_")),
)  # fmt: skip

REDUCTIONS = (
    Operator(OperatorKind.REDUCTION, _aten("""
        sum sum.dim_IntList sum_to_size mean mean.dim nansum nanmean prod prod.dim_int trace
        max max.dim min min.dim amax amin aminmax argmax argmin median median.dim nanmedian nanmedian.dim mode kthvalue
        all all.dim all.dims _is_all_true _is_any_true any any.dim any.dims count_nonzero count_nonzero.dim_IntList
        var var.dim var.correction var_mean var_mean.dim var_mean.correction
        std std.dim std.correction std_mean std_mean.dim std_mean.correction
        norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dtype norm.ScalarOpt_dim_dtype
        linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord linalg_norm linalg_norm.ord_str
        frobenius_norm.dim norm_except_dim logsumexp dist pairwise_distance cosine_similarity
        quantile quantile.scalar trapezoid.dx histc histogram.bin_ct histogram.bins_tensor
        _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors
        _aminmax _aminmax.dim linalg__powsum _foreach_max _foreach_norm.Scalar _foreach_powsum.Scalar
        _pdist_forward _pdist_backward
    """)),
    Operator(OperatorKind.SCAN, _aten("""
        cumsum cumprod cumprod_backward cummax cummin cummaxmin_backward logcumsumexp _logcumsumexp diff
    """)),
    Operator(OperatorKind.SOFTMAX, _aten("""
        softmax.int _softmax log_softmax.int _log_softmax _safe_softmax
        _softmax_backward_data _log_softmax_backward_data _masked_softmax _masked_softmax_backward
    """)),
    Operator(OperatorKind.NORMALIZATION, _aten("""
        batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit.no_stats
        _native_batch_norm_legit_no_training layer_norm native_layer_norm rms_norm _fused_rms_norm
        group_norm native_group_norm instance_norm renorm _weight_norm _weight_norm_interface
        native_batch_norm_backward native_layer_norm_backward _fused_rms_norm_backward
        native_group_norm_backward _weight_norm_interface_backward
        _batch_norm_no_update _batch_norm_with_update_functional batch_norm_backward glu_jvp glu_backward_jvp
        fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fused_moving_avg_obs_fq_helper_functional
        _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward
        _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward
    """)),
)  # fmt: skip

PICTURES = (
    Operator(OperatorKind.POOLING, _aten("""
        avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
        max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
        avg_pool2d_backward avg_pool3d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward
        adaptive_max_pool3d_backward max_unpool2d max_unpool3d
        fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d fractional_max_pool3d_backward
    """)),
    Operator(OperatorKind.RESIZE, _aten("""
        upsample_nearest1d upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec
        upsample_nearest3d upsample_nearest3d.vec _upsample_nearest_exact1d _upsample_nearest_exact1d.vec
        _upsample_nearest_exact2d _upsample_nearest_exact2d.vec _upsample_nearest_exact3d _upsample_nearest_exact3d.vec
        pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
        upsample_linear1d upsample_linear1d.vec upsample_linear1d_backward
        upsample_bilinear2d upsample_bilinear2d.vec upsample_bilinear2d_backward
        _upsample_bilinear2d_aa _upsample_bilinear2d_aa.vec _upsample_bilinear2d_aa_backward
        affine_grid_generator affine_grid_generator_backward
        grid_sampler grid_sampler_2d grid_sampler_2d_backward
        upsample_trilinear3d upsample_trilinear3d.vec upsample_trilinear3d_backward
        grid_sampler_3d grid_sampler_3d_backward
        upsample_bicubic2d upsample_bicubic2d.vec upsample_bicubic2d_backward
        _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec _upsample_bicubic2d_aa_backward
        _upsample_lanczos2d_aa _upsample_lanczos2d_aa_backward
        _grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward
    """)),
    Operator(OperatorKind.COPY, _aten("""
        pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d im2col
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward col2im
    """)),
)  # fmt: skip

LOSSES = (
    Operator(OperatorKind.LOSS, _aten("""
        cross_entropy_loss
        nll_loss nll_loss_nd nll_loss2d nll_loss_forward nll_loss2d_forward mse_loss l1_loss smooth_l1_loss huber_loss
        binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss
        hinge_embedding_loss margin_ranking_loss cosine_embedding_loss triplet_margin_loss multi_margin_loss
        multilabel_margin_loss multilabel_margin_loss_forward
        nll_loss_backward nll_loss2d_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward
        binary_cross_entropy_backward soft_margin_loss_backward multi_margin_loss_backward
        multilabel_margin_loss_backward
        _ctc_loss _ctc_loss.Tensor _ctc_loss_backward _ctc_loss_backward.Tensor
    """)),
)  # fmt: skip

MOVES = (
    Operator(OperatorKind.VIEW, _aten("""
        view view_as view.dtype _unsafe_view reshape reshape_as flatten.using_ints ravel unflatten.int
        t mT numpy_T transpose.int swapaxes swapdims permute movedim.int movedim.intlist moveaxis.int moveaxis.intlist
        unsqueeze squeeze squeeze.dim squeeze.dims expand expand_as broadcast_to broadcast_tensors
        slice.Tensor select.int narrow unbind.int diagonal unfold alias detach lift_fresh
        split.Tensor split.sizes split_with_sizes chunk tensor_split.sections tensor_split.indices
        unsafe_split.Tensor unsafe_split_with_sizes unsafe_chunk
        atleast_1d atleast_2d atleast_3d meshgrid meshgrid.indexing
        view_as_real view_as_complex real imag _conj conj _neg_view as_strided
    """)),
    Operator(OperatorKind.COPY, _aten("""
        resolve_conj resolve_neg
        clone copy contiguous _to_copy to.dtype to.dtype_layout to.device to.other type_as lift_fresh_copy
        cat concat concatenate stack hstack vstack dstack column_stack row_stack block_diag cartesian_prod pad_sequence
        repeat repeat_interleave.self_int tile flip fliplr flipud roll rot90
        tril triu diag diag_embed diagflat
        select_scatter slice_scatter diagonal_scatter
        select_backward slice_backward diagonal_backward trace_backward unfold_backward
        value_selecting_reduction_backward _stack _chunk_cat lift _foreach_clone _foreach_copy
        alias_copy detach_copy diagonal_copy expand_copy permute_copy select_copy.int slice_copy.Tensor
        split_copy.Tensor split_with_sizes_copy squeeze_copy.default|dim|dims t_copy transpose_copy.int unbind_copy.int
        unfold_copy unsqueeze_copy view_copy.default|dtype view_as_complex_copy view_as_real_copy narrow_copy
        _conj_copy _neg_view_copy _reshape_copy as_strided_copy as_strided_scatter _transform_bias_rescale_qkv
    """)),
    Operator(OperatorKind.INDEXING, _aten("""
        embedding index.Tensor _unsafe_index.Tensor index_select index_copy index_fill.int_Scalar index_fill.int_Tensor
        gather take take_along_dim put scatter.src scatter.value masked_scatter masked_scatter_backward
        one_hot nonzero_static sort sort.stable argsort argsort.stable msort topk bucketize.Tensor bucketize.Scalar
        searchsorted.Tensor searchsorted.Scalar
        index_put _unsafe_index_put index_add index_reduce scatter_add scatter.reduce scatter.value_reduce
        scatter_reduce.two index_select_backward gather_backward
        _index_put_impl _unsafe_masked_index _unsafe_masked_index_put_accumulate embedding_renorm
        segment_reduce _segment_reduce_backward
        embedding_dense_backward embedding_bag embedding_bag.padding_idx _embedding_bag _embedding_bag_forward_only
        _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
    """)),
    Operator(OperatorKind.CREATION, _aten("""
        zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill.Scalar fill.Tensor zero
        empty.memory_format empty_like empty_permuted new_empty new_empty_strided scalar_tensor
        arange arange.start arange.start_step linspace logspace eye eye.m tril_indices triu_indices
        hann_window hann_window.periodic hamming_window.default|periodic|periodic_alpha|periodic_alpha_beta
        bartlett_window.default|periodic blackman_window.default|periodic kaiser_window.default|periodic|beta
        linspace.Tensor_Tensor|Tensor_Scalar|Scalar_Tensor logspace.Tensor_Tensor|Tensor_Scalar|Scalar_Tensor
        range range.step fft_fftfreq fft_rfftfreq empty_strided _foreach_zero
        _efficientzerotensor _new_zeros_with_same_feature_meta
    """)),
)  # fmt: skip

RANDOM = (
    Operator(OperatorKind.RANDOM, _aten("""
        dropout native_dropout alpha_dropout feature_dropout feature_alpha_dropout rrelu rrelu_with_noise_functional
        bernoulli bernoulli.p bernoulli.Tensor multinomial poisson binomial
        rand rand_like randn randn_like randint randint.low randint_like randint_like.low_dtype randperm
        normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor normal.float_float normal_functional
        uniform exponential geometric log_normal cauchy random.default|from|to randint_like.Tensor
        _standard_gamma _sample_dirichlet
        rand.generator rand_like.generator randn.generator randn_like.generator randint.generator|low_generator
        randint_like.generator|Tensor_generator|low_generator_dtype randperm.generator
    """), draws_random_numbers=True),
)  # fmt: skip

COMPOSITES = (
    Operator(OperatorKind.OPTIMIZER, (*(f"opt.{kind}" for kind in OPTIMIZERS), "opt.square_sums", "opt.total_norm")),
    Operator(OperatorKind.COLLECTIVE, (
        "comm.reduce_scatter", "comm.all_gather", "comm.all_reduce", "comm.broadcast", "comm.send", "comm.recv",
        "comm.shard", "comm.index", "comm.copy",
    )),
    Operator(OperatorKind.MEMORY, ("memory.release",)),
    Operator(OperatorKind.GENERATOR, ("random.state", "random.set_state")),
    Operator(OperatorKind.CHECK, (ASSERTION,)),
)  # fmt: skip

TABLE = (
    *PRODUCTS,
    *FACTORIZATIONS,
    *FOURIER,
    *POINTWISE,
    *REDUCTIONS,
    *PICTURES,
    *LOSSES,
    *MOVES,
    *RANDOM,
    *COMPOSITES,
)

OPERATORS: Mapping[str, Operator] = MappingProxyType({name: operator for operator in TABLE for name in operator.names})
"""By full name: `aten.addmm.default`, `opt.adamw`, `comm.reduce_scatter`."""
