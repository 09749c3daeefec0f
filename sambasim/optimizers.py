"""The table of optimizers: what is known of each, in one entry. A hyperparameter that no other has is also a field of
`OptimizerOptions` (`options/training.py`); SambaFlow apps need a class in `samba/optim.py`, DeepSpeed an entry in
`options/deepspeed_file.py`. What an update is given: `Scalars` in `runtime/values/slices.py`. The order of a
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
    torch.optim with the same name, which also writes its `numbers`. After parameters and gradients it takes all states,
    and `numbers` by the step, from 1; lists of states that are not kept are empty. Its keywords are the hyperparameters
    and, if it `asks_for_first`, whether the step is the first. `rounds_once`: it takes 16 bits, too, computes in
    float32 and rounds what it stores."""

    function: str
    numbers: Mapping[str, NumberOfStep] = MappingProxyType({})
    asks_for_first: bool = False
    rounds_once: bool = False

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

    def taken(self, hyperparameters: Numbers) -> Numbers:
        """Those that its update takes."""
        if not isinstance(self.update, Fused):
            return hyperparameters
        names = [name for name in self.defaults if name != "betas"] + ["beta1", "beta2"] * ("betas" in self.defaults)
        return {name: hyperparameters[name] for name in names}


def _lion(parameter: Tensor, gradient: Tensor, states: Mapping[str, Tensor], given: Numbers) -> None:
    """Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023, arXiv:2302.06675, algorithm 2."""
    average = states["exp_avg"]
    direction = average.lerp(gradient, 1 - given["beta1"]).sign_()
    parameter.mul_(1 - given["lr"] * given["weight_decay"]).add_(direction, alpha=-given["lr"])
    average.lerp_(gradient, 1 - given["beta2"])


_AVERAGES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_OF_ADAM = {**_AVERAGES, "max_exp_avg_sq": "max_exp_avg_sq"}
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "maximize": False}
_STEP: Mapping[str, NumberOfStep] = {"step": "step"}
_STEPS_BEFORE: Mapping[str, NumberOfStep] = {"step": "steps before"}
_AMSGRAD = {"max_exp_avg_sq": "amsgrad"}

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "sgd": OptimizerEntry(
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "maximize": False},
        {"momentum": "momentum_buffer"},
        update=Fused("_fused_sgd_", asks_for_first=True),
        torch_name="SGD",
        needs={"momentum": "momentum"},
    ),
    "adam": OptimizerEntry(
        {**_ADAM, "weight_decay": 0.0},
        _OF_ADAM,
        Fused("_fused_adam_", _STEP, rounds_once=True),
        torch_name="Adam",
        needs=_AMSGRAD,
    ),
    "adamw": OptimizerEntry(
        {**_ADAM, "weight_decay": 0.01},
        _OF_ADAM,
        Fused("_fused_adamw_", _STEP, rounds_once=True),
        torch_name="AdamW",
        needs=_AMSGRAD,
    ),
    "adagrad": OptimizerEntry(
        {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, "maximize": False},
        {"sum": "sum"},
        Fused("_fused_adagrad_", _STEP),
        torch_name="Adagrad",
    ),
    "rmsprop": OptimizerEntry(
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False,
         "maximize": False},
        {"square_avg": "square_avg", "grad_avg": "grad_avg", "momentum": "momentum_buffer"},
        Fused("torch.optim.rmsprop", _STEPS_BEFORE),
        torch_name="RMSprop",
        needs={"grad_avg": "centered", "momentum": "momentum"},
    ),
    "adamax": OptimizerEntry(
        {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "maximize": False},
        {"exp_avg": "exp_avg", "exp_inf": "exp_inf"},
        Fused("torch.optim.adamax", _STEPS_BEFORE),
        torch_name="Adamax",
    ),
    "nadam": OptimizerEntry(
        {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum_decay": 4e-3,
         "decoupled_weight_decay": False, "maximize": False},
        _AVERAGES,
        Fused("torch.optim.nadam", {"mu_product": "momenta before", **_STEPS_BEFORE}),
        torch_name="NAdam",
    ),
    "lion": OptimizerEntry({"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, {"exp_avg": "exp_avg"}, _lion),
}  # fmt: skip
"""By kind: the name in the config, and of its operator, `opt.<kind>`."""

OWN = "own"
"""The kind of optimizers of the user's own, whose names in a config are `module:function`."""

FORM_OF_OWN = "def NAME(parameter, gradient, STATE, *, step, lr=1e-3, beta=0.9): …, which changes them in place"

KINDS = (*OPTIMIZERS, OWN)
