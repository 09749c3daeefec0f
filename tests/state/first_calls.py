"""State that a first call makes: values of the first batch, which are lost, and caches, which are exact."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import copy
import functools
from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from tests.state.case import EITHER, EQUAL, REFUSED, Setup, built, case, each, given, net_of, points, zero

FLAG = given(scale=zero, ready=lambda: torch.zeros(()).bool(), mean=lambda: torch.zeros(4))
"""The buffers of the remedy."""


@case(EITHER, given(scale=None), says=("scale", "buffer"))
def scale_of_the_first_batch(net: Any, h: Tensor) -> Tensor:
    if net.scale is None:
        net.scale = h.detach().abs().max()  # here
    return h / net.scale


@scale_of_the_first_batch.rewrite(FLAG)
def scale_and_flag_in_buffers(net: Any, h: Tensor) -> Tensor:
    net.scale.copy_(torch.where(net.ready, net.scale, h.detach().abs().max()))
    net.ready.fill_(True)
    return h / net.scale


@case(EITHER, says=("scale",), whole=True)
def scale_by_attribute_error(net: Any, h: Tensor) -> Tensor:
    try:
        scale: Tensor = net.scale
    except AttributeError:
        scale = net.scale = h.detach().abs().max()  # here
    return h / scale


scale_by_attribute_error.rewrite(FLAG)(scale_and_flag_in_buffers)


@case(EITHER, given(seen=list), says=("seen",), whole=True)
def scale_in_a_list(net: Any, h: Tensor) -> Tensor:
    if not net.seen:
        net.seen.append(h.detach().abs().max())  # here
    return h / net.seen[0]


@case(EITHER, given(kept=dict), says=("kept",), whole=True)
def scale_by_setdefault(net: Any, h: Tensor) -> Tensor:
    kept: Tensor = net.kept.setdefault("scale", h.detach().abs().max())  # here
    return h / kept


@case(EITHER, given(range=None), whole=True)
def number_of_the_first_batch(net: Any, h: Tensor) -> Tensor:
    if net.range is None:
        net.range = max(h.tolist()[0])  # here
    return h / net.range


@case(EITHER, given(ready=False, mean=lambda: torch.zeros(4)), says=("ready",))
def python_flag_beside_a_buffer(net: Any, h: Tensor) -> Tensor:
    if not net.ready:
        net.mean.copy_(h.detach().mean(0))  # here
        net.ready = True  # here
    return h - net.mean


@python_flag_beside_a_buffer.rewrite(FLAG)
def mean_and_flag_in_buffers(net: Any, h: Tensor) -> Tensor:
    net.mean.copy_(torch.where(net.ready, net.mean, h.detach().mean(0)))
    net.ready.fill_(True)
    return h - net.mean


@case(EITHER, given(ready=list, codes=lambda: torch.zeros(4, 4)), whole=True)
def codebook_from_the_first_batch(net: Any, h: Tensor) -> Tensor:
    if not net.ready:
        net.codes.copy_(h.detach())  # here
        net.ready.append(True)  # here
    return h + 0.1 * net.codes[torch.cdist(h, net.codes).argmin(1)]


@case(EITHER, given(ready=False, loc=lambda: nn.Parameter(torch.zeros(4))), whole=True)
def actnorm(net: Any, h: Tensor) -> Tensor:
    if not net.ready:
        with torch.no_grad():
            net.loc.copy_(-h.mean(0))  # here
        net.ready = True  # here
    return h + net.loc


@case(EITHER, given(teacher=None), whole=True)
def teacher_copied_from_the_student(net: Any, h: Tensor) -> Tensor:
    if net.teacher is None:
        net.teacher = [copy.deepcopy(net.b).requires_grad_(False)]  # here
    return h + net.teacher[0](h)


@case(EITHER, given(anchor=dict), whole=True)
def first_weights_kept(net: Any, h: Tensor) -> Tensor:
    if "w" not in net.anchor:
        net.anchor["w"] = net.a.weight.detach().clone()  # here
    return h + (net.a.weight - net.anchor["w"]).sum()


@case(EITHER, given(mask=None), says=("mask",), whole=True)
def dropout_mask_kept(net: Any, h: Tensor) -> Tensor:
    if net.mask is None:
        net.mask = (torch.rand_like(h) > 0.5).float()  # here
    return h * net.mask


@case(EITHER, given(w=None), says=("w",), own_losses=True, whole=True)
def noise_drawn_once(net: Any, h: Tensor) -> Tensor:
    if net.w is None:
        net.w = torch.randn(4)  # here
    return h * net.w


noise_drawn_once.rewrite(given(w=lambda: torch.randn(4)))(lambda net, h: h * net.w)


@functools.lru_cache
def _drawn(size: int) -> Tensor:
    return torch.randn(size)  # here


each(EITHER)(
    lru_cache_around_a_draw=lambda net, h: h + _drawn(4)  # here
)


@functools.cache
def _drawn_by_python(size: int) -> list[float]:
    import random

    return [random.random() for _ in range(size)]  # here


each(EITHER, whole=True)(
    cache_around_a_draw_of_python=lambda net, h: h + torch.tensor(_drawn_by_python(4))  # here
)


FIRST: dict[str, Tensor] = {}


@case(EITHER, says=("FIRST",), whole=True)
def first_batch_in_a_global(net: Any, h: Tensor) -> Tensor:
    if "h" not in FIRST:
        FIRST["h"] = h.detach()  # here
    return h - FIRST["h"]


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @functools.cached_property
    def first_norm(self) -> Tensor:
        return self.layer.weight.detach().norm()  # here

    def forward(self, h: Tensor) -> Tensor:
        result: Tensor = self.layer(h) / self.first_norm  # here
        return result


each(EITHER, given(norms=_Norms), whole=True)(cached_property_of_weights=lambda net, h: net.norms(h))


each(EITHER, given(shift=lambda: _closure()), whole=True)(first_batch_in_a_closure=lambda net, h: net.shift(h))


def _closure() -> Any:
    first = None

    def shift(h: Tensor) -> Tensor:
        nonlocal first
        if first is None:
            first = h.detach().mean(0)  # here
        return h - first

    return shift


# Caches of what depends on neither inputs, parameters nor the generator: exact, and the model works afterwards.

CACHE: dict[int, Tensor] = {}


@case(EQUAL)
def table_in_a_global(net: Any, h: Tensor) -> Tensor:
    if h.shape[1] not in CACHE:
        CACHE[h.shape[1]] = torch.arange(4).float().cos()
    return h + CACHE[h.shape[1]]


@case(EQUAL, whole=True)
def buffer_registered_in_forward(net: Any, h: Tensor) -> Tensor:
    if not hasattr(net, "grid"):
        net.register_buffer("grid", torch.linspace(0, 1, 4), persistent=False)
    return h + net.grid


@functools.lru_cache(maxsize=8)
def _table(size: int) -> Tensor:
    return torch.sin(torch.arange(size) / size)


@case(EQUAL, given(kept=lambda: deque(maxlen=10)))
def deque_that_keeps_activations(net: Any, h: Tensor) -> Tensor:
    net.kept.append(h)
    return h


@case(EQUAL, given(kept=lambda: defaultdict(list)), whole=True)
def defaultdict_that_keeps_activations(net: Any, h: Tensor) -> Tensor:
    net.kept["h"].append(h.detach())
    return h


@case(EQUAL, given(grid=None), whole=True)
def grid_in_an_attribute(net: Any, h: Tensor) -> Tensor:
    if net.grid is None or net.grid.shape[0] != h.shape[0]:
        net.grid = torch.arange(h.shape[0]).view(-1, 1) / 10
    return h + net.grid


class _Positions(nn.Module):
    @functools.cached_property
    def table(self) -> Tensor:
        return torch.tril(torch.ones(4, 4))

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.table


each(EQUAL, given(positions=_Positions), whole=True)(cached_property_of_a_table=lambda net, h: net.positions(h))


@case(EQUAL, given(config=dict), whole=True)
def problem_type_found_in_the_first_call(net: Any, h: Tensor) -> Tensor:
    net.config.setdefault("kind", "regression" if h.is_floating_point() else "classes")
    return h * (2 if net.config["kind"] == "regression" else 3)


@functools.lru_cache
def _numbers(size: int) -> tuple[float, ...]:
    return tuple(1 / (1 + i) for i in range(size))


each(EQUAL, whole=True)(
    lru_cache_of_a_table=lambda net, h: h + _table(4), lru_cache_of_numbers=lambda net, h: h * torch.tensor(_numbers(4))
)


class _Lazy(nn.Module):
    """Its second layer is made in the first call: the optimizer of eager PyTorch does not have it either."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b: nn.Linear | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        if self.b is None:
            self.b = nn.Linear(4, 1)  # here
        result: Tensor = (self.b(h).squeeze(1) - y).square().mean()
        return result


@built(REFUSED, whole=True)
def layer_made_in_the_first_call() -> Setup:
    torch.manual_seed(0)
    return Setup(_Lazy(), points())


@case(EITHER, whole=True, own_losses=True)
def weight_made_in_the_first_call(net: Any, h: Tensor) -> Tensor:
    if not hasattr(net, "w"):
        net.w = nn.Parameter(torch.ones(4))  # here
    return h * net.w


weight_made_in_the_first_call.rebuilt(
    lambda: net_of(lambda net, h: h * net.w, given(w=lambda: nn.Parameter(torch.ones(4))))
)
