"""Seeds and the state of the process: what a call sets outside of the model."""

# Calling a module gives Any, and some functions of torch have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, manual_seed

from tests.state.case import EITHER, EQUAL, REFUSED, Case, case, each, given

NOISE = given(noise=lambda: torch.randn(4, generator=torch.Generator().manual_seed(5)))


def noise_in_a_buffer(net: Any, h: Tensor) -> Tensor:
    return h + net.noise


@case(EITHER)
def seed_of_the_default_generator(net: Any, h: Tensor) -> Tensor:
    torch.default_generator.manual_seed(5)  # here
    return h + torch.randn(4)


@case(EITHER, whole=True)
def seed_imported_from_torch(net: Any, h: Tensor) -> Tensor:
    manual_seed(5)  # here
    return h + torch.randn(4)


@case(EITHER, whole=True)
def seed_of_torch_random(net: Any, h: Tensor) -> Tensor:
    torch.random.manual_seed(5)  # here
    return h + torch.randn(4)


@case(EITHER, whole=True)
def seed_by_another_name(net: Any, h: Tensor) -> Tensor:
    seed = getattr(torch, "manual_" + "seed")
    seed(5)  # here
    return h + torch.randn(4)


@case(EITHER, whole=True)
def fork_of_the_generator(net: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):  # here
        torch.manual_seed(5)  # here
        noise = torch.randn(4)
    return h + noise


@case(EITHER, whole=True)
def state_of_the_generator_set_back(net: Any, h: Tensor) -> Tensor:
    state = torch.get_rng_state()  # here
    torch.manual_seed(5)  # here
    noise = torch.randn(4)
    torch.set_rng_state(state)  # here
    return h + noise


seeds: tuple[Case, ...] = (seed_of_the_default_generator, seed_imported_from_torch, seed_of_torch_random)
for seeded in (*seeds, seed_by_another_name, fork_of_the_generator, state_of_the_generator_set_back):
    seeded.rewrite(NOISE)(noise_in_a_buffer)


@case(EITHER, whole=True)
def fork_around_a_draw(net: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):  # here
        noise = torch.randn(4)
    return h + noise + torch.randn(4)


@case(EITHER, whole=True)
def draw_that_is_repeated(net: Any, h: Tensor) -> Tensor:
    state = torch.get_rng_state()  # here
    first = torch.randn(4)
    torch.set_rng_state(state)  # here
    return h + first + torch.randn(4)


each(REFUSED, whole=True)(
    initial_seed=lambda net, h: h * (1 + torch.initial_seed() % 7),  # here
    initial_seed_of_the_default_generator=lambda net, h: h * (1 + torch.default_generator.initial_seed() % 5),  # here
)


@case(REFUSED, whole=True)
def seed_from_the_clock(net: Any, h: Tensor) -> Tensor:
    torch.seed()  # here
    return h


@case(EITHER, whole=True)
def generator_made_anew(net: Any, h: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)  # here
    return h + torch.randn(4, generator=generator)  # here


generator_made_anew.rewrite(NOISE)(noise_in_a_buffer)


@case(EITHER, whole=True)
def seed_of_numpy(net: Any, h: Tensor) -> Tensor:
    np.random.seed(5)  # here
    return h + torch.from_numpy(np.random.rand(4)).float()  # here


@case(EITHER, whole=True)
def seed_of_python(net: Any, h: Tensor) -> Tensor:
    random.seed(5)  # here
    return h * random.random()  # here


# Modes that a call leaves changed, or in which a conversion fails.

POINTER = given(ptr=lambda: torch.zeros((), dtype=torch.long))


@case(EITHER, POINTER, never_says=("does not depend on any parameter",))
def number_read_without_gradients(net: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        n = int(net.ptr)  # here
    net.ptr.add_(1)
    return h * (n + 1)


@number_read_without_gradients.rewrite(POINTER)
def pointer_kept_as_a_tensor(net: Any, h: Tensor) -> Tensor:
    n = net.ptr.clone()
    net.ptr.add_(1)
    return h * (n + 1)


@case(EITHER, POINTER, never_says=("does not depend on any parameter",), whole=True)
def list_read_in_a_function_without_gradients(net: Any, h: Tensor) -> Tensor:
    @torch.no_grad()
    def read() -> list[float]:
        numbers: list[float] = h.mean(0).tolist()  # here
        return numbers

    return h * max(read())


@case(EITHER, whole=True)
def number_read_under_autocast(net: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        scale = (h @ h.T).abs().max().item()  # here
    return h / scale


@case(EITHER, whole=True)
def number_read_in_float64_by_default(net: Any, h: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        scale = float(h.detach().norm())  # here
    finally:
        torch.set_default_dtype(torch.float32)
    return h / scale


@case(EITHER, whole=True)
def gradients_turned_off_and_on(net: Any, h: Tensor) -> Tensor:
    torch.set_grad_enabled(False)  # here
    scale = h.abs().max()
    torch.set_grad_enabled(True)
    return h / scale


@case(EITHER, whole=True)
def threads_set(net: Any, h: Tensor) -> Tensor:
    torch.set_num_threads(1)  # here
    return h


@case(EITHER, whole=True)
def anomaly_detected(net: Any, h: Tensor) -> Tensor:
    with torch.autograd.set_detect_anomaly(False):  # here
        return h.tanh()


# Transforms of functions.


@case(EITHER, whole=True)
def vmap_of_a_hessian(net: Any, h: Tensor) -> Tensor:
    hessian: Tensor = torch.func.vmap(torch.func.hessian(lambda row: row.pow(3).sum()))(h)  # here
    return h + hessian.sum(1)


@case(EITHER, whole=True)
def vmap_of_jacrev(net: Any, h: Tensor) -> Tensor:
    jacobian: Tensor = torch.func.vmap(torch.func.jacrev(torch.tanh))(h)  # here
    return h + jacobian.sum(1)


@case(EITHER, whole=True)
def vmap_of_a_gradient(net: Any, h: Tensor) -> Tensor:
    gradient: Tensor = torch.func.vmap(torch.func.grad(lambda row: row.pow(3).sum()))(h)  # here
    return h + gradient


@case(EITHER, compiles=8, whole=True)
def gradient_of_a_function_compiled_eight_times(net: Any, h: Tensor) -> Tensor:
    gradient: Tensor = torch.func.grad(lambda v: v.pow(3).sum())(h)  # here
    return h + gradient


@case(EQUAL, whole=True)
def jvp_of_a_function(net: Any, h: Tensor) -> Tensor:
    result: Any = torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))
    return result[0] + 0.1 * result[1]


each(EQUAL, whole=True)(
    hessian_of_one_row=lambda net, h: h @ torch.func.hessian(lambda row: row.pow(3).sum())(h[0]),
    jacfwd_of_a_function=lambda net, h: h @ torch.func.jacfwd(torch.tanh)(h[0]),
)
