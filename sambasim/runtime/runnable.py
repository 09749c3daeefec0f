"""Which programs `run` can train; an app can train more."""

from sambasim.errors import OptionError
from sambasim.ir.program import Program


def check_is_for_run(program: Program) -> None:
    """Raises OptionError for what only an app can run: several optimizers, or a loss that is not one number."""
    loss = program.symbols[program.loss or ""].type
    if len(program.optimizers) > 1:
        what = f"this PEF has {len(program.optimizers)} optimizers, or groups of parameters, with options of their own"
    elif loss.numel > 1:
        what = f"this PEF's first output, {loss}, is a loss for each sample and not one number"
    else:
        return
    raise OptionError(what, remedy="run it by the app that compiled it: python APP.py run --pef …")
