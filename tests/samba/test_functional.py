"""Functions of `samba`, `samba.nn` and `samba.optim` take what torch's of the same names take, and give its bits: each
form below is computed by torch on plain tensors, and by samba on SambaTensors, on plain tensors, and on both mixed."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sambasim import samba
from sambasim.samba import SambaTensor, from_torch_tensor
from tests.samba.harness import compiled, equal, layer_batch, plain, with_sgd

pytestmark = pytest.mark.usefixtures("one_thread")

OF_ONE = """
    abs acos asin atan ceil clone cos cosh deg2rad erf erfc exp exp2 expm1 fix floor frac isfinite isinf isnan isreal
    lgamma
    log log10 log1p log2 logit neg positive rad2deg reciprocal round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt
    square
    tan tanh trunc relu relu6 gelu silu mish hardtanh hardswish hardsigmoid elu selu celu leaky_relu logsigmoid
    softsign
    softplus tanhshrink softshrink hardshrink numel is_floating_point flatten ravel
    sum mean prod amax amin std var argmax argmin max min median nansum nanmean norm all any count_nonzero sort unique
    cumsum:0 cumprod:-1 logcumsumexp:1 softmax:-1 log_softmax:1 softmin:0 logsumexp:-1 diff argsort topk:2 nonzero
    sum:0 mean:1 amax:-1 std:-1 argmin:0 max:1 median:-1 sort:0 unsqueeze:0 unsqueeze:-1 chunk:2 split:2 unbind:1 tril
    triu
    triu:1 diagonal transpose:0,1 swapaxes:0,-1 movedim:0,-1 flip:(0,1) roll:1 rot90 repeat_interleave:2
    tensor_split:3
    squeeze squeeze:0 atleast_3d glu:-1 normalize var_mean std_mean detach
"""
"""Names, with further arguments after a colon: `topk(x, 2)`."""

OF_TWO = """
    add sub mul div true_divide floor_divide remainder fmod pow maximum minimum fmax fmin atan2 hypot copysign xlogy
    eq ne gt
    ge lt le logical_and logical_or logical_xor isclose allclose equal dist mse_loss l1_loss smooth_l1_loss huber_loss
    kl_div
    binary_cross_entropy_with_logits soft_margin_loss cosine_similarity pairwise_distance hstack:2 vstack:2 cat:2
    stack:2
"""
"""Of x and y of one shape; `:2` takes them as a list."""

FORMS = """
    add(x, y, alpha=2); sub(x, 2); mul(x, v); div(x, y, rounding_mode='floor'); pow(2, x); x @ y.mT; v + x; 2 - x
    x[:, 1:]
    clamp(x, -0.5, 0.5); clamp(x, min=0.0); clip(x, max=y); lerp(x, y, 0.3); addcmul(x, y, y, value=2)
    addcdiv(x, y, y)
    sum(x, dim=(0, -1)); sum(x, -1, keepdim=True); mean(x, dim=1, keepdim=True); std(x, -1, unbiased=False)
    norm(x, 2, -1)
    var(x, dim=-1, correction=0); max(x, -1).values; max(x, dim=1, keepdim=True); max(x, y); logsumexp(x, (0, 1))
    amin(x, 0, True)
    softmax(x, dim=1); softmax(x, -1, dtype=torch.float64); softmax(input=x, dim=0); log_softmax(x, dim=-1)
    softmin(x, 1)
    cat([x, y]); cat((x, y), dim=1); cat(tensors=[x, y], dim=-1); stack([x, y, x], 1); split(x, [1, 3], dim=-2)
    chunk(x, 3, -1)
    matmul(x, w); matmul(x, y.mT); einsum('...i,...i->...', x, y); einsum('...ij,jk->...ik', [x, w])
    tensordot(x, w, 1)
    linear(x, c); linear(x, weight=c, bias=u); layer_norm(x, (6,)); layer_norm(x, [6], v, v, 1e-6)
    rms_norm(x, (6,), weight=v)
    dropout(x, 0.5, False); dropout(x, p=0.5, training=False); dropout(x, training=False)
    dropout(x, 0.5, train=False)
    dropout(x, 0.3); dropout(x); alpha_dropout(x, training=True); feature_alpha_dropout(x, 0.2, training=False)
    relu(x, inplace=False); relu(input=x); leaky_relu(x, 0.2); leaky_relu(x, negative_slope=0.3); elu(x, alpha=0.5)
    selu(x, inplace=False); celu(x, 0.5, inplace=False); gelu(x, approximate='tanh'); softplus(x, beta=2)
    threshold(x, 0.1, 20)
    threshold(x, 0.1, 20, inplace=False); hardtanh(x, -0.5, 0.5); prelu(x, a); rrelu(x, training=False)
    glu(x, dim=-1)
    where(x > 0, x, y); where(x > 0, x, 0.0); where(m, x, y); masked_fill(x, m, -1.0); masked_select(x, m)
    x.masked_fill(m, 0)
    gather(x, -1, k); take_along_dim(x, k, -1); scatter(x, -1, k, y); scatter(x, -1, k, 1.0)
    scatter_add(x, 1, k * 0, y)
    index_select(x, 1, j); index_select(x, dim=-1, index=j); index_add(x, 1, j, index_select(y, 1, j))
    index_fill(x, 1, j, 2.0)
    topk(x, 2, dim=-1); topk(x, k=2, dim=1, largest=False); sort(x, dim=1, descending=True); argsort(x, -1, True)
    kthvalue(x, 2)
    reshape(x, (-1, 6)); reshape(input=x, shape=(6, -1)); x.view(-1); transpose(x, -1, -2); squeeze(x[:1], 0)
    unsqueeze(x, dim=1)
    flatten(x, 0, 1); flatten(x, start_dim=1); unflatten(x, -1, (2, 3)); x.expand(5, *x.shape)
    broadcast_to(x[..., :1], x.shape); tile(x, (2,))
    narrow(x, -1, 1, 2); select(x, 0, 1); flip(x, dims=[-1]); roll(x, 1, -1); movedim(x, 0, 1); triu(x, diagonal=1)
    tril(x, -1)
    pad(x, (1, 2)); pad(x, (1, 1), 'constant', 3.0); pad(x, (0, 0, 1, 0), value=-1.0)
    normalize(x, dim=-1); normalize(x, p=1.0, dim=1); cosine_similarity(x, y, dim=-1); pairwise_distance(x, y, p=1.0)
    mse_loss(x, y, reduction='sum'); l1_loss(input=x, target=y, reduction='none'); smooth_l1_loss(x, y, beta=0.5)
    huber_loss(x, y, delta=2.0)
    binary_cross_entropy(sigmoid(x), sigmoid(y)); binary_cross_entropy_with_logits(x, sigmoid(y), reduction='none')
    binary_cross_entropy_with_logits(x, sigmoid(y), pos_weight=v * v); kl_div(x, y, reduction='batchmean')
    kl_div(x, y, log_target=True)
    poisson_nll_loss(x, y); poisson_nll_loss(x, y, log_input=False, reduction='sum'); gaussian_nll_loss(x, y, y * y)
    hinge_embedding_loss(x, sign(y)); hinge_embedding_loss(x, sign(y), margin=0.5, reduction='none')
    soft_margin_loss(x, sign(y))
    margin_ranking_loss(x, y, sign(y)); margin_ranking_loss(x, y, sign(y), margin=0.1, reduction='sum')
    triplet_margin_loss(x, y, x * y); triplet_margin_loss(x, y, x * y, margin=0.5, reduction='none', swap=True)
    addmm(x.reshape(-1, 6)[:4], x.reshape(-1, 6)[:4, :4], y.reshape(-1, 6)[:4]); var_mean(x, dim=-1); aminmax(x)
    std_mean(x, 1)
    one_hot(k, 6); embedding(k, c); embedding(c, k); embedding(k, c, padding_idx=0); bucketize(x, sort(v).values)
    bincount(ravel(k))
    cumsum(x, dim=1); cumprod(x, dim=-1); diff(x, dim=0); histc(x, bins=4); quantile(x, 0.5, dim=-1); cdist(x, y)
    outer(v, v)
    scaled_dot_product_attention(x, y, y); scaled_dot_product_attention(x, y, y, is_causal=True); logaddexp(x, y)
    addmv(u, c, v)
    nan_to_num(x / 0); isin(k, j); meshgrid(v, v, indexing='ij'); combinations(v)
    nn.Linear(6, 3)(x); nn.LayerNorm(6)(x); nn.GELU()(x); nn.Softmax(dim=-1)(x); nn.Dropout(0.5).eval()(x)
    nn.MSELoss()(x, y)
    nn.Embedding(6, 3)(k); nn.Identity()(x); nn.Flatten()(x); nn.PReLU()(x); nn.functional.softmax(x, -1)
    nn.L1Loss(reduction='sum')(x, y)
    nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))(x)
"""
"""Of x, y [..., 4, 6] in two to four dimensions; m, a mask, and k, indices below 4, alike; v [6], u [5], a [1],
w [6, 5], c [5, 6] and j, two indices."""

OF_ONE_RANK = """
    bmm(q, r); baddbmm(s, q, r); baddbmm(s, q, r, beta=0.5, alpha=2); addbmm(s[0], q, r)
    addmm(s[0], q[0], r[0], beta=2, alpha=0.5)
    mm(q[0], r[0]); mv(q[0], r[0, :, 0]); dot(v, v); addmm(v[:3], q[0], r[0]); addmm(input=s[0], mat1=q[0], mat2=r[0])
    bilinear(q[0, :, :3], s[1], s)
    conv1d(f1, g1); conv1d(f1, g1, u[:2], stride=2, padding=1); conv2d(f2, g2)
    conv2d(f2, g2, bias=u[:2], padding='same')
    conv2d(f2, g2, None, 2, 1, 1, 1); conv2d(f2, g2[:, :1].repeat(3, 1, 1, 1), groups=3); conv3d(f3, g3)
    conv3d(f3, g3, padding=1)
    conv_transpose1d(f1, g1.transpose(0, 1)); conv_transpose2d(f2, g2.transpose(0, 1), stride=2); unfold(f2, 2)
    fold(unfold(f2, 2), (8, 8), 2)
    max_pool1d(f1, 2); max_pool1d(f1, kernel_size=2, stride=1); max_pool2d(f2, 2)
    max_pool2d(f2, 3, stride=2, padding=1, ceil_mode=True)
    max_pool2d(f2, 2, return_indices=True); max_pool3d(f3, 2); avg_pool1d(f1, 2); avg_pool2d(f2, 2)
    avg_pool2d(f2, (2, 4), count_include_pad=False)
    avg_pool3d(f3, 2); adaptive_avg_pool1d(f1, 2); adaptive_avg_pool2d(f2, (1, 1)); adaptive_avg_pool2d(f2, 3)
    adaptive_max_pool2d(f2, 2)
    adaptive_max_pool1d(f1, 2); adaptive_max_pool1d(f1, 2, return_indices=True); lp_pool2d(f2, 2, 2)
    interpolate(f2, scale_factor=2); interpolate(f2, size=(4, 4), mode='bilinear', align_corners=False)
    interpolate(f1, 16, mode='linear')
    batch_norm(f2, o3, e3); batch_norm(f2, o3, e3, training=True)
    batch_norm(f2, running_mean=o3, running_var=e3, weight=e3, bias=o3, eps=1e-3)
    group_norm(f2, 3); group_norm(f2, 3, e3, o3); instance_norm(f2); instance_norm(f1, weight=e3, bias=o3)
    local_response_norm(f2, 2)
    pixel_shuffle(f2.reshape(2, 12, 4, 4), 2); pixel_unshuffle(f2, 2); channel_shuffle(f2.reshape(2, 4, 6, 8), 2)
    dropout2d(f2, 0.5, False)
    pad(f2, (1, 1, 2, 2), mode='reflect')
    grid_sample(f2, affine_grid(q[:, :2, :3], (2, 3, 5, 5), align_corners=False), align_corners=False)
    cross_entropy(z, t); cross_entropy(z, t, reduction='none')
    cross_entropy(z, t, label_smoothing=0.1, ignore_index=1); cross_entropy(z, softmax(z, 1))
    cross_entropy(f2, f2.argmax(1)); cross_entropy(z, t, weight=v); nll_loss(log_softmax(z, 1), t)
    nll_loss(log_softmax(z, 1), target=t, reduction='sum')
    multi_margin_loss(z, t); multilabel_margin_loss(z, one_hot(t, 6)); cosine_embedding_loss(z, z * z, sign(z[:, 0]))
    triplet_margin_loss(z, z * z, -z)
    multilabel_soft_margin_loss(z, one_hot(t, 6).float())
    cosine_embedding_loss(z, z * z, sign(z[:, 0]), margin=0.1, reduction='none')
    ctc_loss(log_softmax(d, 2), e, (5, 5), (2, 2))
    ctc_loss(log_softmax(d, 2), e, (5, 5), (2, 2), reduction='sum', zero_infinity=True)
    embedding_bag(t, c, torch.tensor([0, 2])); embedding_bag(t.reshape(2, 2), c, mode='sum'); pdist(z); trapezoid(z)
    cov(z); corrcoef(z)
    searchsorted(sort(z).values, z); diag(v); diag_embed(v); kron(z, z); block_diag(z, z)
    bernoulli(sigmoid(z)); multinomial(softmax(z, 1), 2); gumbel_softmax(z); rrelu(z, 0.1, 0.3, True)
    nn.Conv2d(3, 4, 3)(f2); nn.Conv1d(3, 4, 3, padding=1)(f1); nn.BatchNorm2d(3)(f2); nn.GroupNorm(3, 3)(f2)
    nn.MaxPool2d(2)(f2); nn.Upsample(scale_factor=2)(f2)
    nn.LSTM(6, 4)(s6); nn.GRU(6, 4, batch_first=True)(s6); nn.MultiheadAttention(6, 2)(s6, s6, s6)
    nn.TransformerEncoderLayer(6, 2, 8).eval()(s6)
    nn.CrossEntropyLoss()(z, t); nn.NLLLoss()(log_softmax(z, 1), t); nn.BCEWithLogitsLoss()(z, sigmoid(z))
    nn.ConvTranspose2d(3, 2, 2)(f2)
    nn.Bilinear(4, 4, 3)(q[0], r[0].mT); nn.EmbeddingBag(6, 3)(t.reshape(2, 2))
    nn.KLDivLoss(reduction='batchmean')(z, z); nn.AdaptiveAvgPool2d(1)(f2)
"""
"""Of tensors of one shape: see `of_one_rank`."""

MAKERS = """
    zeros(2, 3); zeros((2, 3)); zeros(size=(2, 3)); ones([2, 3], dtype=torch.int64); empty(0, 3); full((2, 3), 1.5)
    full(size=(2,), fill_value=True)
    arange(5); arange(1, 5); arange(1, 5, 2); arange(start=0, end=1, step=0.25); linspace(0, 1, 5)
    linspace(0, 1, steps=3); logspace(0, 2, 3)
    eye(3); eye(2, 3); rand(2, 3); rand([2, 3]); randn(2, 3); randn((2, 3), dtype=torch.float64); randint(5, (2, 3))
    randint(2, 5, (2, 3))
    randint(low=2, high=5, size=(2,)); randperm(6); normal(0.0, 1.0, (2, 3)); normal(mean=0.0, std=2.0, size=(4,))
    randn(())
    full_like(z, 2.0); zeros_like(z, dtype=torch.int64); ones_like(input=z); rand_like(z); randint_like(z, 5)
    normal(z, z * z); empty_like(z[:0])
"""
"""They give a SambaTensor whatever goes in."""


def _random(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def _of_any_rank(rank: int) -> dict[str, Tensor]:
    shape = (2, 3, 4, 6)[4 - rank :]
    vectors = {"v": _random(3, 6), "u": _random(4, 5), "a": torch.tensor([0.25]), "w": _random(5, 6, 5)}
    x, y = _random(1, *shape), _random(2, *shape)
    indices = {"k": (x.abs() * 10).long() % 4, "j": torch.tensor([1, 0])}
    return {"x": x, "y": y, "m": y > 0, "c": _random(6, 5, 6), **vectors, **indices}


def of_one_rank() -> dict[str, Tensor]:
    """f are features in one to three dimensions, g their kernels; z are logits and t their classes."""
    shapes = {"q": (2, 3, 4), "r": (2, 4, 3), "s": (2, 3, 3), "s6": (2, 3, 6), "d": (5, 2, 6), "z": (4, 6), "v": (6,)}
    features = {f"f{n}": (2, 3, *(8,) * n) for n in (1, 2, 3)} | {f"g{n}": (2, 3, *(3,) * n) for n in (1, 2, 3)}
    made = {name: _random(len(name), *shape) for name, shape in (shapes | features).items()}
    integers = {"t": torch.tensor([0, 3, 1, 2]), "e": torch.tensor([[1, 2], [3, 1]])}
    return made | integers | {"u": _random(4, 5), "c": _random(6, 5, 6), "o3": torch.zeros(3), "e3": torch.ones(3)}


class Names(Mapping[str, Any]):
    """The names in a form: tensors, those in `samba` as SambaTensors; and else functions of `libraries`."""

    def __init__(self, libraries: tuple[Any, ...], tensors: Mapping[str, Tensor], samba_ones: str = "") -> None:
        self._libraries, self._tensors, self._samba_ones = libraries, tensors, samba_ones
        self.a_samba_tensor_went_in = False

    def __getitem__(self, name: str) -> Any:
        if name in self._tensors:
            is_samba = name in self._samba_ones.split()
            self.a_samba_tensor_went_in |= is_samba
            tensor = self._tensors[name].clone()
            return from_torch_tensor(tensor, name=name) if is_samba else tensor
        if name == "torch":
            return torch
        return next(getattr(library, name) for library in self._libraries if hasattr(library, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _value(form: str, names: Names) -> list[Any]:
    torch.default_generator.manual_seed(0)
    return tree_leaves(eval(form, {}, names))


def same(one: Any, expected: Any) -> bool:
    return _bits(one) == _bits(expected) if isinstance(expected, Tensor) else bool(one == expected)


def _bits(tensor: Tensor) -> object:
    values = plain(tensor).resolve_conj().resolve_neg()
    kind = torch.complex128 if values.is_complex() else torch.float64 if values.is_floating_point() else values.dtype
    return values.dtype, values.shape, values.to(kind).contiguous().numpy().tobytes()


def wrong(form: str, tensors: Mapping[str, Tensor], makes: bool = False) -> Iterator[str]:
    """In words, where samba's value of `form` is not torch's."""
    try:
        gold = _value(form, Names((nn.functional, torch), tensors))
    except (TypeError, RuntimeError):  # arguments of torch.embedding, which those of nn.functional are not
        gold = _value(form, Names((torch, nn.functional), tensors))
    others = [name for name in tensors if name not in ("x", "f2", "z")]
    for samba_ones in (list(tensors), ["x", "f2", "z"], others, []):
        names = Names((samba,), tensors, " ".join(samba_ones))
        try:
            found = _value(form, names)
        except Exception as error:
            yield f"{form}: {type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        if len(found) != len(gold) or not all(map(same, found, gold)):
            yield f"{form} has other values than torch's"
        kind = SambaTensor if names.a_samba_tensor_went_in or makes else Tensor
        if any(isinstance(one, Tensor) and type(one) is not kind for one in found):
            yield f"{form} is no {kind.__name__}"


def forms_of(text: str) -> list[str]:
    return [form.strip() for line in text.splitlines() for form in line.split(";") if form.strip()]


def words_of(text: str, operands: str) -> Iterator[str]:
    """`"sum:0"` is `sum(x, 0)`."""
    for name, _, others in (word.partition(":") for word in text.split()):
        yield f"{name}({', '.join(filter(None, (operands, others)))})"


def test_the_third_argument_of_softmax_is_its_dtype_as_in_torch() -> None:
    x = from_torch_tensor(torch.ones(2, 3))
    assert [samba.softmax(x, 1, torch.float64).dtype, samba.log_softmax(x, 1, torch.float64).dtype] == [
        torch.float64
    ] * 2
    one, other = torch.empty(2), torch.empty(2, dtype=torch.int64)
    assert samba.max(x, 1, out=(one, other))[0] is one


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_function_has_torchs_forms_and_bits_in_any_rank(rank: int) -> None:
    pairs = [form.replace("x, y, 2", "[x, y]") for form in words_of(OF_TWO, "x, y")]
    forms = [*words_of(OF_ONE, "x"), *pairs, *forms_of(FORMS)]
    assert len({form.partition("(")[0] for form in forms}) > 150
    assert not [fault for form in forms for fault in wrong(form, _of_any_rank(rank))]


@pytest.mark.filterwarnings("ignore")
def test_a_function_of_tensors_of_one_rank_has_torchs_forms_and_bits() -> None:
    assert not [fault for form in forms_of(OF_ONE_RANK) for fault in wrong(form, of_one_rank())]


def test_what_makes_a_tensor_has_torchs_forms_and_bits() -> None:
    assert not [fault for form in forms_of(MAKERS) for fault in wrong(form, of_one_rank(), makes=True)]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_an_optimizer_takes_what_torchs_takes(name: str) -> None:
    ours, of_torch = getattr(samba.optim, name), getattr(torch.optim, name)
    given = dict.fromkeys(("lr",), 0.5)
    settings = [of([nn.Parameter(torch.ones(2))], 0.25).defaults for of in (ours, of_torch)]
    assert {**settings[0], "max_grad_norm": None} == {**settings[1], "max_grad_norm": None}
    defaults = {key: one.default for key, one in inspect.signature(of_torch).parameters.items() if key != "params"}
    by_keyword = ours([nn.Parameter(torch.ones(2))], **{**defaults, **given}).defaults
    assert {key: by_keyword[key] for key in defaults} == {**defaults, **given}


def _addmm_forms() -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Arguments of samba.addmm, and torch's result."""
    x, w, bias = _random(1, 2, 3, 4), _random(2, 4, 5), _random(3, 5)
    scales: Any = {"beta": 0.5, "alpha": 2.0}
    yield {"input": bias, "mat1": x[0], "mat2": w}, torch.addmm(bias, x[0], w)
    yield {"input": bias, "mat1": x[0], "mat2": w, **scales}, torch.addmm(bias, x[0], w, **scales)
    yield {"input": bias, "mat1": x, "mat2": w}, nn.functional.linear(x, w.T, bias)
    deep, large = _random(4, 6, 2, 3, 4), _random(5, 2, 3, 5)
    yield {"input": bias[:1], "mat1": deep, "mat2": w}, nn.functional.linear(deep, w.T, bias[:1].repeat(5))
    rows = torch.addmm(large.view(6, 5), x.view(6, 4), w, **scales)
    yield {"input": large, "mat1": x, "mat2": w, **scales}, rows.view(2, 3, 5)
    stack = _random(6, 2, 4, 5)
    yield {"input": large, "mat1": x, "mat2": stack, **scales}, torch.baddbmm(large, x, stack, **scales)
    yield {"input": bias, "mat1": x[0], "mat2": stack}, torch.baddbmm(bias, x[:1].expand(2, 3, 4), stack)
    wide = torch.baddbmm(bias.expand(12, 3, 5), deep.flatten(0, 1), stack.repeat(6, 1, 1))
    yield {"input": bias, "mat1": deep, "mat2": stack}, wide.view(6, 2, 3, 5)
    nan = torch.full_like(bias, torch.nan)
    for mat1, mat2 in ((x[0], w), (x, w), (x, stack)):
        yield {"input": nan, "mat1": mat1, "mat2": mat2, "beta": 0}, torch.matmul(mat1, mat2)


def test_addmm_takes_any_leading_dimensions() -> None:
    for arguments, expected in _addmm_forms():
        transposed = {**arguments, "mat2": arguments["mat2"].mT.contiguous(), "is_transposed": True}
        assert equal(samba.addmm(**arguments), expected)
        torch.testing.assert_close(samba.addmm(**transposed), expected)
        out = torch.empty(0)
        assert samba.addmm(**arguments, out=out) is out
        assert equal(out, expected)
        mixed = {**arguments, "mat1": from_torch_tensor(arguments["mat1"], name="x")}
        assert type(samba.addmm(**mixed)) is SambaTensor
        assert equal(samba.addmm(*mixed.values()) if len(mixed) == 3 else samba.addmm(**mixed), expected)
    x, w, bias = _random(1, 2, 3, 4), _random(2, 5, 4), _random(3, 5)
    larger = _random(1, 7, 2, 3, 5)
    for wrong_operands in ((bias, x, w), (bias, x[0], w), (bias[:2], x, w.T), (larger, x, w.T), (bias, x[0, 0], x)):
        with pytest.raises(RuntimeError, match=r"must be a matrix|cannot be multiplied|expanded size|sizes provided"):
            samba.addmm(*wrong_operands)


class Adding(nn.Module):
    """Features [batch, 6] to a loss, by samba.addmm in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"weight": (5, 3), "stack": (2, 5, 4), "bias": (5,), "shift": (4,), "unused": (4,)}
        for number, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, nn.Parameter(_random(number, *shape)))

    def forward(self, x: Tensor, functions: Any = samba) -> Any:
        rows = x.view(2, 2, 2, 3).flatten(1, 2)
        hidden = functions.addmm(self.bias, rows, self.weight, is_transposed=True)
        out = functions.addmm(self.shift, hidden, self.stack, beta=0.5, alpha=2)
        return functions.addmm(input=self.unused, mat1=out, mat2=out.mT @ out, beta=0).square().mean()


class OfTorch:
    """What `Adding` computes by torch's own functions."""

    @staticmethod
    def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, is_transposed: bool = False, **scales: Any) -> Tensor:
        if is_transposed:
            return nn.functional.linear(mat1, mat2, input)
        return torch.baddbmm(input, mat1, mat2, **scales)


@pytest.mark.usefixtures("app")
def test_addmm_in_a_compiled_forward_has_torchs_gradients(tmp_path: Any) -> None:
    made, batch = with_sgd(Adding), layer_batch()
    model: Any = made[0]
    samba.utils.trace_graph(model, batch, made[1], pef=compiled(made, batch, tmp_path))
    (loss,) = samba.session.run(batch, section_types=["FWD", "BCKWD"])
    expected = model(samba.to_torch(batch[0]), OfTorch)
    expected.backward()
    assert equal(loss, expected)
    assert all(equal(parameter.sn_grad, parameter.grad) for parameter in model.parameters())
