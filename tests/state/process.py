"""Seeds and the state of the process: what a call sets outside of the model."""

import torch

from tests.state.case import cases, given, net_of

NOISE = given(noise=lambda: torch.randn(4, generator=torch.Generator().manual_seed(5)))
BUFFERED = {"rewritten": lambda: net_of(lambda net, h: h + net.noise, NOISE)}
UNSAID = {"never_says": ("does not depend on any parameter",)}
POINTER = given(ptr=lambda: torch.zeros((), dtype=torch.long))


cases(__name__)("""
import random
from sambasim.compiler.capture import explain
case initial_seed: REFUSED
    return h * (1 + torch.initial_seed() % 7)  # here
case seed_of_the_default_generator: REFUSED, **BUFFERED, says=(explain.SEEDED.rewrite,)
    torch.default_generator.manual_seed(5)  # here
    return h + torch.randn(4)
case fork_of_the_generator: EITHER, **BUFFERED
    with torch.random.fork_rng(devices=[]):  # here
        torch.manual_seed(5)  # here
        noise = torch.randn(4)
    return h + noise
case fork_around_a_draw: EITHER, whole=True
    with torch.random.fork_rng(devices=[]):  # here
        noise = torch.randn(4)
    return h + noise + torch.randn(4)
case seed_from_the_clock: REFUSED, whole=True
    torch.seed()  # here
case seed_of_python: EITHER, whole=True
    random.seed(5)  # here
    return h * random.random()  # here

# Modes that a call leaves changed, or in which a conversion fails.
case number_read_without_gradients: EITHER, POINTER, **UNSAID, whole=True
    with torch.no_grad():
        n = int(net.ptr)  # here
    net.ptr.add_(1)
    return h * (n + 1)
rewrite pointer_kept_as_a_tensor: POINTER
    n = net.ptr.clone()
    net.ptr.add_(1)
    return h * (n + 1)
case number_read_under_autocast: EITHER, whole=True
    with torch.autocast("cpu", torch.bfloat16):
        scale = (h @ h.T).abs().max().item()  # here
    return h / scale
case number_read_in_float64_by_default: EITHER, whole=True
    torch.set_default_dtype(torch.float64)
    try:
        scale = float(h.detach().norm())  # here
    finally:
        torch.set_default_dtype(torch.float32)
    return h / scale
case threads_set: EITHER, whole=True
    torch.set_num_threads(1)  # here
case anomaly_detected: EITHER, whole=True
    with torch.autograd.set_detect_anomaly(False):  # here
        return h.tanh()

# Transforms of functions.
case hessian_and_jacfwd_of_one_row: EQUAL, whole=True
    return h @ (torch.func.hessian(lambda row: row.pow(3).sum())(h[0]) + torch.func.jacfwd(torch.tanh)(h[0]))
case vmap_of_functions: EQUAL, whole=True
    hessian = torch.func.vmap(torch.func.hessian(lambda row: row.pow(3).sum()))(h)
    jacobian = torch.func.vmap(torch.func.jacrev(torch.tanh))(h)
    gradient = torch.func.vmap(torch.func.grad(lambda row: row.pow(3).sum()))(h)
    return h + (hessian + jacobian).sum(1) + gradient
case gradient_of_a_function_compiled_eight_times: EITHER, compiles=8, whole=True
    gradient = torch.func.grad(lambda v: v.pow(3).sum())(h)  # here
    return h + gradient
""")
