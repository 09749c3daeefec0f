"""The table of optimizers: what is known of each, in one entry. A hyperparameter that no other has is also a field of
`OptimizerOptions` (`options/training.py`); SambaFlow apps need a class in `samba/optim.py`, DeepSpeed an entry in
`options/deepspeed_file.py`. What an update is given: `Scalars` in `runtime/values/optimizers.py`. The order of a
slice's arithmetic must be the same wherever the slice begins, at multiples of 64 elements: then any number of replicas
gives the same bits."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Tensor: TypeAlias = Any
"""One of torch's: who needs only the names of optimizers does not import torch."""

Numbers: TypeAlias = Mapping[str, float | bool]
"""Hyperparameters by the names of their runtime arguments: `betas` are `beta1` and `beta2`."""


class Fused(NamedTuple):
    """An update by a fused kernel of torch, which takes lists of tensors. `operands` follow parameters and gradients:
    states, `step`, or "" for an empty list. `keywords`: by hyperparameters, and whether the step is the first."""

    kernel: str
    operands: tuple[str, ...]
    keywords: Callable[[Numbers, bool], Mapping[str, float | bool]]


Written: TypeAlias = Callable[[Tensor, Tensor, Mapping[str, Tensor], Numbers], object]
"""An update in tensor methods: `(parameter, gradient, states, hyperparameters)`, in place. Tensors are flat."""


class OptimizerEntry(NamedTuple):
    """One optimizer: the default options, its states and what torch.optim calls them. `needs` is the hyperparameter
    without which it keeps no state; `torch_name` is its class in torch.optim."""

    defaults: Mapping[str, object]
    states: Mapping[str, str]
    update: Fused | Written
    torch_name: str | None = None
    needs: str | None = None

    def kept_states(self, hyperparameters: Numbers) -> tuple[str, ...]:
        """The states that an optimizer with these hyperparameters keeps."""
        return () if self.needs is not None and not hyperparameters.get(self.needs) else tuple(self.states)


def _keywords(*names: str, **fixed: bool) -> Callable[[Numbers, bool], Mapping[str, float | bool]]:
    """The hyperparameters `names`, `is_first_step` if it is one of them, and those that are `fixed`."""

    def keywords(given: Numbers, is_first: bool) -> Mapping[str, float | bool]:
        known = {**given, "is_first_step": is_first}
        return {name: known[name] for name in names} | {"maximize": False} | fixed

    return keywords


def _lion(parameter: Tensor, gradient: Tensor, states: Mapping[str, Tensor], given: Numbers) -> None:
    """Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023, arXiv:2302.06675, algorithm 2."""
    average = states["exp_avg"]
    direction = average.lerp(gradient, 1 - given["beta1"]).sign_()
    parameter.mul_(1 - given["lr"] * given["weight_decay"]).add_(direction, alpha=-given["lr"])
    average.lerp_(gradient, 1 - given["beta2"])


_AVERAGES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_ADAM_KEYWORDS = _keywords("lr", "weight_decay", "beta1", "beta2", "eps", amsgrad=False)
_OF_ADAM = (("exp_avg", "exp_avg_sq", "", "step"), _ADAM_KEYWORDS)
_SGD_KEYWORDS = _keywords("lr", "weight_decay", "momentum", "dampening", "nesterov", "is_first_step")

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    "sgd": OptimizerEntry(
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0},
        {"momentum": "momentum_buffer"},
        update=Fused("_fused_sgd_", ("momentum",), _SGD_KEYWORDS),
        torch_name="SGD",
        needs="momentum",
    ),
    "adam": OptimizerEntry({**_ADAM, "weight_decay": 0.0}, _AVERAGES, Fused("_fused_adam_", *_OF_ADAM), "Adam"),
    "adamw": OptimizerEntry({**_ADAM, "weight_decay": 0.01}, _AVERAGES, Fused("_fused_adamw_", *_OF_ADAM), "AdamW"),
    "adagrad": OptimizerEntry(
        {"lr": 1e-2, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0},
        {"sum": "sum"},
        update=Fused("_fused_adagrad_", ("sum", "step"), _keywords("lr", "lr_decay", "weight_decay", "eps")),
        torch_name="Adagrad",
    ),
    "lion": OptimizerEntry({"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, {"exp_avg": "exp_avg"}, _lion),
}
"""By kind: the name in the config, and of its operator, `opt.<kind>`."""
