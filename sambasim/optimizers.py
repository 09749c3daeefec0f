"""The table of optimizers: what is known of each, in one entry. A hyperparameter that no other has is also a field of
`OptimizerOptions` (`options/training.py`); SambaFlow apps need a class in `samba/optim.py`, DeepSpeed an entry in
`options/deepspeed_file.py`. What an update is given: `Scalars` in `runtime/values/optimizers.py`. The order of a
slice's arithmetic must be the same wherever the slice begins, at multiples of 64 elements: then any number of replicas
gives the same bits. Users write optimizers of their own as functions: see `compiler/own_optimizer.py`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

Tensor: TypeAlias = Any
"""One of torch's: who needs only the names of optimizers does not import torch."""

Numbers: TypeAlias = Mapping[str, float | bool]
"""Hyperparameters by the names of their runtime arguments: `betas` are `beta1` and `beta2`."""


NumberOfStep: TypeAlias = Literal["step", "steps before", "momenta before"]
"""The number of a step from 1, of the steps before it, and the product of NAdam's momenta in those."""


class Fused(NamedTuple):
    """An update by a function of torch, which takes lists of tensors: a fused kernel, or that of a module of
    torch.optim with the same name, which also writes its `numbers`. `operands` follow parameters and gradients: states,
    and `numbers` by the step, from 1; lists of states that are not kept are empty. `keywords`: by hyperparameters, and
    whether the step is the first."""

    function: str
    operands: tuple[str, ...]
    keywords: Callable[[Numbers, bool], Mapping[str, float | bool]]
    numbers: Mapping[str, NumberOfStep] = MappingProxyType({})

    @property
    def is_kernel(self) -> bool:
        return "." not in self.function


Written: TypeAlias = Callable[[Tensor, Tensor, Mapping[str, Tensor], Numbers], object]
"""An update in tensor methods: `(parameter, gradient, states, hyperparameters)`, in place. Tensors are flat."""


class OptimizerEntry(NamedTuple):
    """One optimizer: the default options, its states and what torch.optim calls them. `needs`: by state the
    hyperparameter without which it is not kept; `torch_name` is its class in torch.optim."""

    defaults: Mapping[str, object]
    states: Mapping[str, str]
    update: Fused | Written
    torch_name: str | None = None
    needs: Mapping[str, str] = MappingProxyType({})

    def kept_states(self, hyperparameters: Numbers) -> tuple[str, ...]:
        """The states that an optimizer with these hyperparameters keeps."""
        needs = self.needs
        return tuple(state for state in self.states if state not in needs or hyperparameters.get(needs[state]))


def _keywords(*names: str, **fixed: bool) -> Callable[[Numbers, bool], Mapping[str, float | bool]]:
    """The hyperparameters `names`, `is_first_step` if it is one of them, and those that are `fixed`."""

    def keywords(given: Numbers, is_first: bool) -> Mapping[str, float | bool]:
        known = {**given, "is_first_step": is_first}
        return {name: known[name] for name in (*names, "maximize")} | fixed

    return keywords


def _lion(parameter: Tensor, gradient: Tensor, states: Mapping[str, Tensor], given: Numbers) -> None:
    """Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023, arXiv:2302.06675, algorithm 2."""
    average = states["exp_avg"]
    direction = average.lerp(gradient, 1 - given["beta1"]).sign_()
    parameter.mul_(1 - given["lr"] * given["weight_decay"]).add_(direction, alpha=-given["lr"])
    average.lerp_(gradient, 1 - given["beta2"])


_AVERAGES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_OF_ADAM = {**_AVERAGES, "max_exp_avg_sq": "max_exp_avg_sq"}
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False}
_MOMENTS = ("lr", "weight_decay", "beta1", "beta2", "eps")
_NUMBERS: Mapping[str, NumberOfStep] = {"step": "step"}
_NUMBERS_BEFORE: Mapping[str, NumberOfStep] = {"step": "steps before"}


def _adam(kernel: str) -> Fused:
    return Fused(kernel, (*_OF_ADAM, "step"), _keywords(*_MOMENTS, "amsgrad"), _NUMBERS)


_AMSGRAD = {"max_exp_avg_sq": "amsgrad"}
_SGD_KEYWORDS = _keywords("lr", "weight_decay", "momentum", "dampening", "nesterov", "is_first_step")
_PLAIN = {"foreach": False}

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "sgd": OptimizerEntry(
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False},
        {"momentum": "momentum_buffer"},
        update=Fused("_fused_sgd_", ("momentum",), _SGD_KEYWORDS),
        torch_name="SGD",
        needs={"momentum": "momentum"},
    ),
    "adam": OptimizerEntry({**_ADAM, "weight_decay": 0.0}, _OF_ADAM, _adam("_fused_adam_"), "Adam", _AMSGRAD),
    "adamw": OptimizerEntry({**_ADAM, "weight_decay": 0.01}, _OF_ADAM, _adam("_fused_adamw_"), "AdamW", _AMSGRAD),
    "adagrad": OptimizerEntry(
        {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "maximize": False},
        {"sum": "sum"},
        Fused("_fused_adagrad_", ("sum", "step"), _keywords("lr", "lr_decay", "weight_decay", "eps"), _NUMBERS),
        torch_name="Adagrad",
    ),
    "rmsprop": OptimizerEntry(
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False,
         "maximize": False},
        {"square_avg": "square_avg", "grad_avg": "grad_avg", "momentum": "momentum_buffer"},
        Fused("torch.optim.rmsprop", ("square_avg", "grad_avg", "momentum", "step"),
              _keywords("lr", "alpha", "eps", "weight_decay", "momentum", "centered", **_PLAIN), _NUMBERS_BEFORE),
        torch_name="RMSprop",
        needs={"grad_avg": "centered", "momentum": "momentum"},
    ),
    "adamax": OptimizerEntry(
        {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "maximize": False},
        {"exp_avg": "exp_avg", "exp_inf": "exp_inf"},
        Fused("torch.optim.adamax", ("exp_avg", "exp_inf", "step"), _keywords(*_MOMENTS, **_PLAIN), _NUMBERS_BEFORE),
        torch_name="Adamax",
    ),
    "nadam": OptimizerEntry(
        {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum_decay": 4e-3,
         "decoupled_weight_decay": False, "maximize": False},
        _AVERAGES,
        Fused("torch.optim.nadam", (*_AVERAGES, "mu_product", "step"),
              _keywords(*_MOMENTS, "momentum_decay", "decoupled_weight_decay", **_PLAIN),
              {**_NUMBERS_BEFORE, "mu_product": "momenta before"}),
        torch_name="NAdam",
    ),
    "lion": OptimizerEntry({"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, {"exp_avg": "exp_avg"}, _lion),
}  # fmt: skip
"""By kind: the name in the config, and of its operator, `opt.<kind>`."""

OWN = "own"
"""The kind of optimizers of the user's own, whose names in a config are `module:function`."""

FORM_OF_OWN = "def NAME(parameter, gradient, STATE, *, step, lr=1e-3, beta=0.9): …, which changes them in place"

KINDS = (*OPTIMIZERS, OWN)
