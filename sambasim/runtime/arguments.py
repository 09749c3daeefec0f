"""The runtime arguments of a program, bound for one run: hyperparameters, replica number and count, seed."""

from collections.abc import Mapping
from typing import TypeAlias

from sambasim.errors import InternalError
from sambasim.ir.program import ROUNDING_SEED, Program
from sambasim.options.training import OptimizerOptions

Arguments: TypeAlias = Mapping[str, float | int | bool]


def bind_arguments(program: Program, optimizer: OptimizerOptions, world_size: int, rank: int, seed: int) -> Arguments:
    """A value for every runtime argument: that of this run, else the program's default.

    Raises InternalError for a hyperparameter that the program does not take.
    """
    bound: dict[str, float | int | bool] = {argument.name: argument.default for argument in program.runtime_arguments}
    given: dict[str, float | int | bool] = {
        f"{one.name}__{name}": value
        for one in program.optimizers
        for name, value in optimizer.hyperparameters().items()
    }
    if program.data_parallel is not None:
        given |= {"dp_scale_factor": world_size, "dp_replica": rank}
    if ROUNDING_SEED in bound:
        given[ROUNDING_SEED] = seed
    unknown = sorted(set(given) - set(bound))
    if unknown:
        raise InternalError(f"the program takes no runtime argument {unknown[0]}")
    return {**bound, **given}


def of_optimizer(arguments: Arguments, optimizer: str) -> dict[str, float | int | bool]:
    """The hyperparameters of one optimizer, without the prefix."""
    prefix = f"{optimizer}__"
    return {name.removeprefix(prefix): value for name, value in arguments.items() if name.startswith(prefix)}
