"""State that a first call makes: values of the first batch, which are lost, and caches, which are exact."""

# Some functions of torch have no types.
# mypy: no-warn-return-any

import torch
from torch import Tensor

from tests.state.case import cases, given, zero

FLAG = given(scale=zero, ready=lambda: torch.zeros(()).bool(), mean=lambda: torch.zeros(4))
"""The buffers of the remedy."""
FIRST: dict[str, Tensor] = {}
CACHE: dict[int, Tensor] = {}


cases(__name__)("""
import copy
import functools
from collections import defaultdict, deque
case scale_by_attribute_error: EITHER, says=("scale",), whole=True
    try:
        scale = net.scale
    except AttributeError:
        scale = net.scale = h.detach().abs().max()  # here
    return h / scale
rewrite scale_and_flag_in_buffers: FLAG
    net.scale.copy_(torch.where(net.ready, net.scale, h.detach().abs().max()))
    net.ready.fill_(True)
    return h / net.scale
case python_flag_beside_a_buffer: EITHER, given(ready=False, mean=lambda: torch.zeros(4)), says=("ready",)
    if not net.ready:
        net.mean.copy_(h.detach().mean(0))  # here
        net.ready = True  # here
    return h - net.mean
rewrite mean_and_flag_in_buffers: FLAG
    net.mean.copy_(torch.where(net.ready, net.mean, h.detach().mean(0)))
    net.ready.fill_(True)
    return h - net.mean
case actnorm: EITHER, given(ready=False, loc=lambda: nn.Parameter(torch.zeros(4))), whole=True
    if not net.ready:
        with torch.no_grad():
            net.loc.copy_(-h.mean(0))  # here
        net.ready = True  # here
    return h + net.loc
case teacher_copied_from_the_student: EITHER, given(teacher=None), whole=True
    if net.teacher is None:
        net.teacher = [copy.deepcopy(net.b).requires_grad_(False)]  # here
    return h + net.teacher[0](h)
case first_weights_kept: EITHER, given(anchor=dict)
    if "w" not in net.anchor:
        net.anchor["w"] = net.a.weight.detach().clone()  # here
    return h + (net.a.weight - net.anchor["w"]).sum()
case noise_drawn_once: EITHER, given(w=None), says=("w",), own_losses=True, whole=True
    if net.w is None:
        net.w = torch.randn(4)  # here
    return h * net.w
rewrite: given(w=lambda: torch.randn(4))
    return h * net.w
@functools.lru_cache
def _drawn(size):
    return torch.randn(size)  # here
case lru_cache_around_a_draw: EITHER
    return h + _drawn(4)  # here
@functools.cache
def _drawn_by_python(size):
    import random
    return [random.random() for _ in range(size)]  # here
case cache_around_a_draw_of_python: EITHER, whole=True
    return h + torch.tensor(_drawn_by_python(4))  # here
case first_batch_in_a_global: EITHER, says=("FIRST",)
    if "h" not in FIRST:
        FIRST["h"] = h.detach()  # here
    return h - FIRST["h"]

# Caches of what depends on neither inputs, parameters nor the generator: exact, and the model works afterwards.
case table_in_a_global: EQUAL
    if h.shape[1] not in CACHE:
        CACHE[h.shape[1]] = torch.arange(4).float().cos()
    return h + CACHE[h.shape[1]]
case deque_that_keeps_activations: EQUAL, given(kept=lambda: deque(maxlen=10))
    net.kept.append(h)
case defaultdict_that_keeps_activations: EQUAL, given(kept=lambda: defaultdict(list)), whole=True
    net.kept["h"].append(h.detach())
case layer_made_in_the_first_call: REFUSED, whole=True
    if not hasattr(net, "c"):
        net.c = nn.Linear(4, 4)  # here
    return net.c(h)
case weight_made_in_the_first_call: EITHER, whole=True, own_losses=True
    if not hasattr(net, "w"):
        net.w = nn.Parameter(torch.ones(4))  # here
    return h * net.w
rebuilt:
    return net_of(lambda net, h: h * net.w, given(w=lambda: nn.Parameter(torch.ones(4))))
""")
