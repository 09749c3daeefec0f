"""Dynamic loss scaling for float16: Micikevicius et al., Mixed Precision Training, ICLR 2018, arXiv:1710.03740."""

from dataclasses import dataclass

from sambasim.options.training import LossScaleOptions

_LARGEST = {"float16": 2.0**15}
"""The largest power of two of a dtype, where it is small."""


@dataclass(slots=True)
class LossScale:
    """The scale `value` of the next step, on all ranks the same. `good_steps`: since the last overflow or change;
    `tolerated`: overflows that do not halve the scale yet."""

    value: float
    good_steps: int
    tolerated: int

    @classmethod
    def first(cls, options: LossScaleOptions, dtype: str) -> "LossScale":
        """`dtype`: of the loss, which must hold the scale."""
        return cls(min(options.start, _LARGEST.get(dtype, options.start)), 0, options.hysteresis - 1)

    def update(self, options: LossScaleOptions, dtype: str, *, overflowed: bool) -> None:
        """After a step. The value may fall below the minimum: then the run must end."""
        if not options.dynamic:
            return
        if not overflowed:
            self.good_steps += 1
            if options.consecutive:
                self.tolerated = options.hysteresis - 1
            if self.good_steps == options.window:
                self.value = min(2 * self.value, _LARGEST.get(dtype, 2 * self.value))
                self.good_steps, self.tolerated = 0, options.hysteresis - 1
            return
        self.good_steps = 0
        if self.tolerated:
            self.tolerated -= 1
        else:
            self.value /= 2
