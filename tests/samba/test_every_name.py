"""Every public function of `samba`, class of `samba.nn` and method of SambaTensor is called, and gives torch's bits:
with the sample inputs of torch's own tests, in the rows of test_functional.py, or in those below. What no call can show
is in UNCALLED, with the reason."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from importlib import import_module
from inspect import isclass, signature
from itertools import chain, islice, product
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import TestCase

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from sambasim import samba
from sambasim.samba import SambaTensor, from_torch_tensor
from sambasim.samba.functional import _MAKERS, operators
from tests.samba import test_functional as rows

pytestmark = pytest.mark.usefixtures("one_thread")

FURTHER = """
    adaptive_max_pool1d_with_indices(f1, 2); adaptive_max_pool2d_with_indices(f2, 2)
    adaptive_max_pool3d_with_indices(f3, 2)
    max_pool1d_with_indices(f1, 2); max_pool2d_with_indices(f2, 2); max_pool3d_with_indices(f3, 2)
    fractional_max_pool2d_with_indices(f2, 2, output_size=3); fractional_max_pool3d_with_indices(f3, 2, output_size=3)
    lp_pool1d(f1, 2, 2); lp_pool3d(f3, 2, 2); upsample(f2, scale_factor=2)
    affine_grid_generator(q[:, :2, :3], (2, 3, 5, 5), False)
    grid_sampler(f2, affine_grid_generator(q[:, :2, :3], (2, 3, 5, 5), False), 0, 0, False)
    conv_tbc(d, c.mT.expand(3, 6, 5), u); convolution(f2, g2, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    native_channel_shuffle(f2.reshape(2, 4, 6, 8), 2)
    dropout1d(f1, 0.5, False); dropout_(z, 0.5, True); alpha_dropout_(z, 0.5, True); feature_dropout(f2, 0.5, True)
    feature_dropout_(f2, 0.5, True); feature_alpha_dropout_(f2, 0.5, True); native_dropout(z, 0.5, True)
    binomial(e3 * 5, e3 / 2); poisson(e3 * 3); svd_lowrank(z); pca_lowrank(z); rrelu_(z)
    can_cast(torch.int64, torch.float32); promote_types(torch.int64, torch.float32); result_type(z, 1)
    chain_matmul(z, z.mT, z); det(s); inverse(s); matrix_power(s, 2); slogdet(s); orgqr(*geqrf(s[0]))
    frobenius_norm(z, (0, 1)); nuclear_norm(z); norm_except_dim(z); vander(v)
    detach_copy(z); select_copy(z, 0, 1); slice_copy(z, 0, 1, 2); split_copy(z, 2)
    unsafe_split_with_sizes(z, (1, 3)); view_as_complex_copy(q.reshape(2, 3, 2, 2))
    embedding_renorm_(c, t, 1.0, 2.0); segment_reduce(v, 'sum', lengths=torch.tensor([2, 4]))
    fake_quantize_per_tensor_affine(z, 0.1, 0, 0, 255)
    get_device(z); is_complex(z); is_conj(z); is_distributed(z); is_inference(z); is_neg(z); is_nonzero(z[0, 0])
    is_same_size(z, z); is_signed(z); is_vulkan_available()
    rnn_tanh(s6, q[:1], (z, z[:, :4]), False, 1, 0.0, False, False, False)
    rnn_relu(s6, q[:1], (z, z[:, :4]), False, 1, 0.0, False, False, False)
    gru(s6, q[:1, :, :1], (z[:3], z[:3, :1]), False, 1, 0.0, False, False, False)
    lstm(s6, (q[:1, :, :1], q[:1, :, :1]), (z, z[:, :1]), False, 1, 0.0, False, False, False)
    rnn_tanh_cell(s6[0], q[0], z, z[:, :4]); rnn_relu_cell(s6[0], q[0], z, z[:, :4])
    gru_cell(s6[0], q[0, :, :1], z[:3], z[:3, :1]); lstm_cell(s6[0], (q[0, :, :1], q[0, :, :1]), z, z[:, :1])

    z.H; z.T; z.mH; q.mT; z.real; z.data; z.grad; z.grad_fn; z.shape; z.dtype; z.device; z.layout; z.ndim; z.nbytes
    z.itemsize; z.is_leaf; z.is_meta; z.is_cpu; z.is_cuda; z.is_quantized; z.is_sparse; z.is_sparse_csr; z.is_nested
    z.is_mkldnn; z.requires_grad; z.retains_grad; z.output_nr; z.dim(); z.ndimension(); z.nelement(); z.numel()
    z.size(); z.size(0); z.size(dim=-1); z.stride(); z.stride(0); z.storage_offset(); z.element_size(); z.dim_order()
    z.get_device(); z.is_contiguous(); z.is_complex(); z.is_conj(); z.is_distributed(); z.is_floating_point()
    z.is_inference(); z.is_neg(); z[0, 0].is_nonzero(); z.is_same_size(z); z.is_set_to(z); z.is_shared(); z.is_signed()
    z.is_pinned()
    z.cpu(); z.type(); z.type(torch.float64); z.type('torch.DoubleTensor'); z.type_as(t); z.detach(); z.tolist()
    z.numpy().tolist(); z.requires_grad_(); z.requires_grad_(False); z.share_memory_(); z.to_dense()
    z.apply_(lambda a: a + 1); z.map_(z, lambda a, b: a * b); z.map2_(z, z, lambda a, b, c: a + b * c)
    z.random_(5); z.fill_diagonal_(1.0); z.copy_(z * 2)
    z.set_(z * 2); z.new(2, 0); z.new_tensor([1.0]); z.double().float_power_(2)
    s.det(); s.inverse(); s.matrix_power(2); s.slogdet(); s[0].orgqr(v[:3]); z.unsafe_split_with_sizes((1, 3))

    nn.AlphaDropout()(z); nn.FeatureAlphaDropout()(f2); nn.Dropout1d()(f1); nn.Dropout2d()(f2); nn.Dropout3d()(f3)
    nn.ChannelShuffle(3)(f2); nn.PixelShuffle(2)(f2.reshape(2, 12, 4, 4)); nn.PixelUnshuffle(2)(f2)
    nn.CosineSimilarity()(z, z * z); nn.PairwiseDistance()(z, -z); nn.CrossMapLRN2d(2)(f2); nn.Hardsigmoid()(z)
    nn.Fold((8, 8), 2)(nn.Unfold(2)(f2)); nn.LazyLinear(3)(z); nn.RReLU()(z); nn.Unflatten(1, (2, 3))(z)
    nn.LazyBatchNorm1d()(f1); nn.LazyBatchNorm2d()(f2); nn.LazyBatchNorm3d()(f3)
    nn.LazyInstanceNorm1d()(f1); nn.LazyInstanceNorm2d()(f2); nn.LazyInstanceNorm3d()(f3)
    nn.MaxUnpool1d(2)(*max_pool1d(f1, 2, return_indices=True))
    nn.MaxUnpool2d(2)(*nn.MaxPool2d(2, return_indices=True)(f2))
    nn.MaxUnpool3d(2)(*nn.MaxPool3d(2, return_indices=True)(f3)); nn.FractionalMaxPool2d(2, output_size=3)(f2)
    nn.FractionalMaxPool3d(2, output_size=3)(f3); nn.NLLLoss2d()(log_softmax(f2, 1), f2.argmax(1))
    nn.TripletMarginLoss()(z, -z, z * z); nn.TripletMarginWithDistanceLoss()(z, -z, z * z)
    nn.AdaptiveLogSoftmaxWithLoss(6, 4, [2])(z, z[:, :4].argmax(1)); nn.UpsamplingBilinear2d(scale_factor=2)(f2)
    nn.UpsamplingNearest2d(scale_factor=2)(f2); nn.ModuleList([nn.ReLU()])[0](z)
    nn.ModuleDict({'a': nn.ReLU()})['a'](z)
    nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, 8), 1)(s6, s6); z @ nn.ParameterList([z.mT])[0]
    z @ nn.ParameterDict({'a': z.mT})['a']
"""
"""Forms of functions, methods and classes for which torch has no samples."""

FURTHER_MAKERS = """
    tensor([1.0, 2.0]); tensor(data=[[1, 2]], dtype=torch.float64); tensor(3, pin_memory=False); as_tensor([1, 2])
    as_tensor(z, dtype=torch.float64); asarray([1, 2], dtype=torch.float32); asarray(obj=z, copy=True)
    from_numpy(z.numpy()); frombuffer(b'12345678', dtype=torch.int32, count=2)
    scalar_tensor(2.0); range(0, 3)
    hann_window(5); hamming_window(5, periodic=False); bartlett_window(5); blackman_window(5)
    kaiser_window(5, True, 3.0)
    tril_indices(3, 3); triu_indices(row=3, col=4, offset=1); empty_strided((0, 2), (2, 1))
    empty_permuted((0, 2), (1, 0))
"""

STATEMENTS = """
    x[0] = y[1]; x[:, 1] += 2; x[y > 0] = 0; x[..., -1] = x[..., 0]; x -= y; x *= 2; x /= y[:1]; x **= 2
    x.data = y; x.requires_grad = True
"""
"""Of x and y of one shape."""

UNCALLED = {
    "they are for other devices than a CPU": """
        cudnn_* miopen_* mkldnn_* fbgemm_* batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt
        batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats batch_norm_update_stats scaled_mm
        scaled_grouped_mm grouped_mm cuda xpu ipu mtia pin_memory record_stream to_mkldnn is_ipu is_maia is_mps is_mtia
        is_vulkan is_xla is_xpu SyncBatchNorm DataParallel
    """,
    "a SambaTensor is dense": """
        native_norm sparse_* *_sparse_* to_sparse* *indices_copy values_copy dsmm hsmm hspmm saddmm smm spmm sspaddmm
        coalesce is_coalesced indices col_indices crow_indices ccol_indices row_indices dense_dim sparse_dim
        to_padded_tensor
    """,
    "a SambaTensor has no quantized numbers": """
        q_* qscheme quantize* fake_quantize_per_channel_affine fused_moving_avg_obs_fake_quant choose_qparams_optimized
        dequantize int_repr empty_quantized
    """,
    "a SambaTensor holds real numbers": "istft imag view_as_real view_as_real_copy",
    "torch refuses or has replaced them": """
        eig lstsq solve symeig resize resize_as reinforce storage_type volatile name module_load slice_inverse
    """,
    "a SambaTensor is a view of the tensor that it was made from": "detach_",
    "what they give differs at each call": "data_ptr const_data_ptr storage untyped_storage from_file",
    "autograd has tests of its own": """
        backward register_hook register_post_accumulate_grad_hook retain_grad grad_dtype
    """,
    "SambaFlow has them, and torch does not; each has tests of its own": """
        triu_fill sn_data sn_grad sn_name torch torch_tensor as_subclass
    """,
    "they are for torch's own code": "sym_constrain_range* assert_int_or_pair index",
    "a class is made of them": "Module Container RNNBase RNNCellBase Buffer Parameter Uninitialized*",
}
"""Names, or the beginning or end of several, by the reason why they are in no row."""


class Call(NamedTuple):
    """Of `ours`, and what is to give the same: the first of `of_torch` that takes the arguments."""

    name: str
    of_torch: Sequence[Callable[..., Any]]
    ours: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


def _samples(module: str, table: str) -> list[Any]:
    """A table of torch's own tests, without what importing it changes: the settings of hypothesis, and torch's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "hypothesis", None)
        patch.setitem(sys.modules, "expecttest", SimpleNamespace(TestCase=TestCase))  # for what is not called here
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        found: list[Any] = getattr(import_module(f"torch.testing._internal.{module}"), table)
    return found


def _method(name: str) -> Callable[..., Any]:
    return lambda one, *arguments, **keywords: getattr(one, name)(*arguments, **keywords)


def _of_functions() -> Iterator[Call]:
    """Calls of each function, in place too, by its names, and of the methods of these names."""
    torch.default_generator.manual_seed(0)
    for op in _samples("common_methods_invocations", "op_db"):
        names = [name.rpartition("nn.functional.")[2] for name in (op.name, *(alias.name for alias in op.aliases))]
        names += [f"{name}_" for name in names]
        dtype = torch.float32 if torch.float32 in op.dtypes else torch.int64
        is_dense = names[0].isidentifier() and names[0] != "to_sparse"
        samples = op.sample_inputs_func(op, "cpu", dtype, False) if is_dense else ()  # not of linalg.norm and others
        for number, sample in enumerate(islice(samples, 0, 24, 4)):
            given, keywords = (sample.input, *sample.args), sample.kwargs
            tensors = [one for one in tree_leaves((given, keywords)) if isinstance(one, Tensor)]
            if any(one.is_complex() or one.layout is not torch.strided for one in tensors):
                continue  # no SambaTensors
            for name in names:
                if name in operators() and name not in samba.__all__:
                    of_torch = [vars(one)[name] for one in (nn.functional, torch) if name in vars(one)]
                    yield Call(name, of_torch, getattr(samba, name), given, keywords)
                    if number == 0:
                        yield Call(name, of_torch, getattr(samba, name), given[1:], {"input": given[0], **keywords})
                if hasattr(Tensor, name) and isinstance(sample.input, Tensor):
                    yield Call(f".{name}", [_method(name)], _method(name), given, keywords)


def _of_classes() -> Iterator[Call]:
    for info in _samples("common_modules", "module_db"):
        inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=True)
        for made, given in ((each.constructor_input, each.forward_input) for each in inputs[:2]):

            def call(*arguments: Any, info: Any = info, made: Any = made, **keywords: Any) -> Any:
                return info.module_cls(*made.args, **made.kwargs)(*arguments, **keywords)

            yield Call(f".{info.module_cls.__name__}", [call], call, given.args, given.kwargs)


def _result(function: Callable[..., Any], given: Any, choice: Sequence[bool]) -> Any:
    """The results of a call with new tensors, SambaTensors where `choice` says so; or the class of the error."""
    is_samba = iter(choice)

    def new(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        copied = one.detach().clone()
        return from_torch_tensor(copied) if next(is_samba) else copied

    arguments, keywords = tree_map(new, given)
    torch.default_generator.manual_seed(0)
    try:
        return tree_leaves(function(*arguments, **keywords))
    except Exception as error:
        return type(error)


def _faults(call: Call, taken: set[str]) -> Iterator[str]:
    """Where ours differs from torch's. The name is added to `taken` if torch takes the arguments."""
    given = (call.arguments, call.keywords)
    size = sum(isinstance(one, Tensor) for one in tree_leaves(given))
    results = [_result(function, given, [False] * size) for function in call.of_torch]
    expected = next((one for one in results if isinstance(one, list)), results[0])
    if isinstance(expected, list):
        taken.add(call.name)
    for choice in sorted({(first, *[other] * (size - 1))[:size] for first, other in product((True, False), repeat=2)}):
        found, where = _result(call.ours, given, choice), f"{call.name}, {choice}"
        if not isinstance(found, list) or not isinstance(expected, list):
            if found is not expected:
                yield f"{where}: {found} for {expected}"
            continue
        if "empty" not in call.name and not (len(found) == len(expected) and all(map(rows.same, found, expected))):
            yield f"{where}: other values than torch's"
        counted = (
            choice[:1] if call.name.endswith("_") and call.name[-2] != "_" else choice
        )  # what is written to stays what it is
        kind = SambaTensor if any(counted) or call.name in _MAKERS else Tensor
        if any(isinstance(one, Tensor) and type(one) is not kind for one in found):
            yield f"{where}: no {kind.__name__}"


def _named_in(forms: Iterable[str]) -> Iterator[str]:
    """Names in forms: `name` of functions, `.name` of methods and classes."""
    for node in chain.from_iterable(map(ast.walk, map(ast.parse, forms))):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield f".{node.attr}"


@pytest.mark.filterwarnings("ignore")
def test_a_name_without_samples_has_torchs_forms_and_bits() -> None:
    assert not [fault for form in rows.forms_of(FURTHER) for fault in rows.wrong(form, rows.of_one_rank())]
    made = [fault for form in rows.forms_of(FURTHER_MAKERS) for fault in rows.wrong(form, rows.of_one_rank(), True)]
    assert not made


def test_a_statement_writes_what_it_does_in_torch() -> None:
    for statement, kinds in product(rows.forms_of(STATEMENTS), product((SambaTensor, Tensor), repeat=2)):
        values = [torch.arange(1.0, 13).reshape(3, 4), torch.arange(-6.0, 6).reshape(3, 4)]
        plain, ours = dict(zip("xy", values, strict=True)), {}
        for name, kind in zip("xy", kinds, strict=True):
            ours[name] = from_torch_tensor(plain[name].clone()) if kind is SambaTensor else plain[name].clone()
        for names in (plain, ours):
            exec(statement, {}, names)
        assert rows.same(ours["x"], plain["x"]), statement
        assert (type(ours["x"]), ours["x"].requires_grad) == (kinds[0], plain["x"].requires_grad)
    layer: Any = nn.Linear(1, 1)
    out = torch.empty(1)
    with torch.no_grad():
        layer.bias += from_torch_tensor(torch.ones(1))
    assert torch.add(from_torch_tensor(torch.ones(1)), 1, out=out) is out


@pytest.mark.filterwarnings("ignore")
def test_every_public_name_is_in_a_row_or_gives_torchs_bits_and_errors_for_torchs_samples() -> None:
    patterns = [pattern for names in UNCALLED.values() for pattern in names.split()]
    tables = rows.FORMS + rows.OF_ONE_RANK + rows.MAKERS + FURTHER + FURTHER_MAKERS
    forms = (*rows.forms_of(tables), *rows.words_of(rows.OF_ONE, "x"), *rows.words_of(rows.OF_TWO, "x, y"))
    called = {*_named_in(forms)}
    assert not [fault for call in chain(_of_functions(), _of_classes()) for fault in _faults(call, called)]
    classes = {name for name, one in vars(nn).items() if isclass(one) and issubclass(one, nn.Module | Tensor)}
    methods = {name for name in dir(Tensor) if name[0] != "_"}
    uncalled = {*operators(), *(f".{name}" for name in classes | methods)} - called
    matches = {one: [name for name in uncalled if fnmatch(name.removeprefix("."), one)] for one in patterns}
    assert not uncalled.difference(*matches.values()), "they are neither called nor in UNCALLED"
    assert all(matches.values()), "what is in UNCALLED is called"


def _trained(optimizer: Callable[..., Any], settings: Sequence[Any], keywords: Mapping[str, Any]) -> Sequence[Tensor]:
    """Weights after three steps."""
    weights = [nn.Parameter(torch.arange(12.0).reshape(4, 3) / 7), nn.Parameter(torch.ones(2))]
    made = optimizer(weights, *settings, **keywords)
    for _ in range(3):
        made.zero_grad()
        torch.autograd.backward([weight.square().sum() for weight in weights])
        made.step()
    return weights


def test_an_optimizer_steps_as_torchs() -> None:
    samples = {one.optim_cls.__name__: one for one in _samples("common_optimizers", "optim_db")}
    for name in samba.optim.__all__:
        ours, of_torch = getattr(samba.optim, name), getattr(torch.optim, name)
        parameters = signature(of_torch).parameters.values()
        positional = [one.default for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        forms = [((), one.kwargs) for one in samples[name].optim_inputs_func("cpu")]
        for settings, keywords in (*forms, (positional[1:], {})):
            trained = [_trained(one, settings, keywords) for one in (ours, of_torch)]
            assert all(map(rows.same, *trained)), (name, keywords)
    for name in {*samples} - {*samba.optim.__all__}:
        assert not hasattr(samba.optim, name)
