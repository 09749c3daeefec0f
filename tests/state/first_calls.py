"""State that a first call makes: values of the first batch, which are lost, and caches, which are exact."""

# Some functions of torch have no types.
# mypy: no-warn-return-any

import torch
from torch import Tensor

from tests.state.case import cases, given

FLAG = given(ready=lambda: torch.zeros(()).bool(), mean=lambda: torch.zeros(4))
"""The buffers of the remedy."""
CACHE: dict[int, Tensor] = {}


cases(__name__)("""
import functools
from collections import deque
case python_flag_beside_a_buffer: EITHER, given(ready=False, mean=lambda: torch.zeros(4)), says=("ready",)
    if not net.ready:
        net.mean.copy_(h.detach().mean(0))  # here
        net.ready = True  # here
    return h - net.mean
rewrite mean_and_flag_in_buffers: FLAG
    net.mean.copy_(torch.where(net.ready, net.mean, h.detach().mean(0)))
    net.ready.fill_(True)
    return h - net.mean
case first_weights_kept: EITHER, given(anchor=dict)
    if "w" not in net.anchor:
        net.anchor["w"] = net.a.weight.detach().clone()  # here
    return h + (net.a.weight - net.anchor["w"]).sum()
@functools.lru_cache
def _drawn(size):
    return torch.randn(size)  # here
case lru_cache_around_a_draw: EITHER
    return h + _drawn(4)  # here

# Caches of what depends on neither inputs, parameters nor the generator: exact, and the model works afterwards.
case table_in_a_global: EQUAL, whole=True
    if h.shape[1] not in CACHE:
        CACHE[h.shape[1]] = torch.arange(4).float().cos()
    return h + CACHE[h.shape[1]]
case deque_that_keeps_activations: EQUAL, given(kept=lambda: deque(maxlen=10)), whole=True
    net.kept.append(h)
case weight_made_in_the_first_call: REFUSED, own_losses=True
    if not hasattr(net, "w"):
        net.w = nn.Parameter(torch.ones(4))  # here
    return h * net.w
rebuilt:
    return net_of(lambda net, h: h * net.w, given(w=lambda: nn.Parameter(torch.ones(4))))
""")
