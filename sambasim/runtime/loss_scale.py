"""Dynamic loss scaling for float16: Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740."""

from dataclasses import dataclass

from sambasim.errors import NumericsError
from sambasim.options.training import LossScaleOptions


@dataclass(slots=True)
class LossScale:
    """The scale `value` of the next step, on all ranks the same. `good_steps`: since the last overflow or change;
    `tolerated`: overflows that are skipped before the next one halves the scale."""

    value: float
    good_steps: int
    tolerated: int

    @classmethod
    def first(cls, options: LossScaleOptions) -> "LossScale":
        return cls(options.start, 0, options.hysteresis - 1)

    def update(self, options: LossScaleOptions, *, overflowed: bool) -> None:
        """After a step. Raises NumericsError if the scale would fall below the minimum."""
        if not options.dynamic:
            return
        if not overflowed:
            self.good_steps += 1
            if self.good_steps == options.window:
                self.value, self.good_steps, self.tolerated = 2 * self.value, 0, options.hysteresis - 1
            return
        self.good_steps = 0
        if self.tolerated:
            self.tolerated -= 1
        elif self.value / 2 >= options.minimum:
            self.value /= 2
        else:
            raise NumericsError(
                f"gradients are not finite in float16 even at the smallest loss scale, {options.minimum:g}",
                remedy="a smaller learning rate, --dtype bf16, or a smaller training.loss_scale.minimum",
            )
