"""DP03 and DP07: replicas that do not have the same weights, or are not trained with the same hyperparameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.ir.types import SymbolKind
from sambasim.runtime.digests import tensor_sha256
from sambasim.samba.checks.findings import Finding
from sambasim.samba.machine import Machine


@dataclass(frozen=True, slots=True)
class Trained:
    """What a replica trains, and how: digests of its parameters by symbol, the optimizer steps that they have had, and
    the hyperparameters of each of its optimizers."""

    weights: Mapping[str, str]
    steps: int
    hyperparameters: Sequence[Mapping[str, float | bool]]


def trained(machine: Machine, *, read: bool = True) -> Trained:
    """Of this rank. `read` says whether the device's weights are those that were trained; others are left out."""
    weights = {
        name: tensor_sha256(machine.replica.read(name))
        for name, symbol in machine.program.symbols.items()
        if read and symbol.kind is SymbolKind.PARAMETER
    }
    return Trained(weights, machine.replica.steps, list(machine.replica.hyperparameters.values()))


def different_start(replicas: Sequence[Trained], where: str | None) -> Finding | None:
    """DP03, of replicas before their first step."""
    first = replicas[0]
    for rank, replica in enumerate(replicas):
        apart = [name for name, digest in first.weights.items() if replica.weights[name] != digest]
        if replica.steps != first.steps:
            apart.append("the number of optimizer steps")
        if apart:
            return Finding(
                "DP03",
                f"replica {rank} starts from other weights than replica 0: {apart[0]} differs; "
                "it goes on with those of replica 0",
                where,
                "samba.utils.set_seed(…) with one number on all ranks before the model is made; or load one checkpoint",
            )
    return None


def different_course(replicas: Sequence[Trained], when: str, where: str | None) -> Finding | None:
    """DP07, of replicas that started alike. `when` is a time, such as "before step 8"."""
    return different_hyperparameters(replicas, when, where) or different_weights(replicas, when, where)


def different_hyperparameters(replicas: Sequence[Trained], when: str, where: str | None) -> Finding | None:
    """DP07, of what they are trained with."""
    first = replicas[0]
    for rank, replica in enumerate(replicas):
        for one, other in zip(first.hyperparameters, replica.hyperparameters, strict=True):
            apart = [name for name, value in one.items() if other[name] != value]
            if apart:
                return Finding(
                    "DP07",
                    f"{when} replica {rank} trains with {apart[0]} {other[apart[0]]:g}, and replica 0 with "
                    f"{one[apart[0]]:g}",
                    where,
                    "the same hyperparam_dict on every rank: let it depend on the step, and not on the rank",
                )
    return None


def different_weights(replicas: Sequence[Trained], when: str, where: str | None) -> Finding | None:
    """DP07, of what came of it. Weights that a replica leaves out are not compared with those of the first."""
    first = replicas[0]
    for rank, replica in enumerate(replicas):
        changed = [name for name, digest in first.weights.items() if replica.weights.get(name, digest) != digest]
        if changed:
            return Finding(
                "DP07",
                f"{when} replica {rank} has other weights than replica 0: {changed[0]} differs",
                where,
                "load weights into the model on every rank before samba.session.to_device(model), or on none",
            )
    return None
