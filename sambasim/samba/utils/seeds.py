"""Seeds of the random generators."""

import os
from numbers import Integral

from sambasim.errors import OptionError, UserError
from sambasim.runtime.determinism import seed_everything
from sambasim.samba.checks.place import app_line

_VARIABLE = "SAMBA_SEED"


def set_seed(seed: int) -> None:
    """Seed torch, numpy and random on this rank. The same seed on all ranks makes the same weights.

    Raises UserError unless `seed` is a whole number of at least 0.
    """
    if not isinstance(seed, Integral) or seed < 0:
        raise UserError(
            f"a seed is a whole number of at least 0, and this one is {seed!r}",
            where=app_line(),
            remedy="utils.set_seed(1)",
        )
    seed_everything(int(seed))


def seed_from_environment() -> None:
    """`set_seed` with the value of SAMBA_SEED, if the environment has it. Raises OptionError for a bad value."""
    text = os.environ.get(_VARIABLE)
    if not text:
        return
    if not text.isdecimal():
        raise OptionError(
            f"{_VARIABLE} is {text!r} in the environment, and a seed is a whole number of at least 0",
            remedy=f"export {_VARIABLE}=256, or unset {_VARIABLE}",
        )
    set_seed(int(text))
