"""What DeepSpeed's documentation says of its schedules and its loss scaler, written after it: classes that are stepped
after each optimizer step that was not skipped. None of sambasim's code is used."""

import math
from collections.abc import Mapping
from typing import Any


class Schedule:
    """The learning rate `lr` and `beta1` (None: not changed) of the next step."""

    lr: float
    beta1: float | None = None

    def __init__(self) -> None:
        self.iteration = -1

    def step(self) -> None:
        self.iteration += 1
        self.change()

    def change(self) -> None:
        raise NotImplementedError


class WarmupLR(Schedule):
    def __init__(
        self,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        super().__init__()
        self.low, self.high, self.steps, self.kind = warmup_min_lr, warmup_max_lr, max(2, warmup_num_steps), warmup_type
        self.lr = warmup_min_lr

    def change(self) -> None:
        self.lr = self.low + (self.high - self.low) * self.gamma()

    def gamma(self) -> float:
        if self.iteration < self.steps:
            if self.kind == "log":
                return math.log(self.iteration + 1) / math.log(self.steps)
            return self.iteration / self.steps
        return self.after()

    def after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    def __init__(self, total_num_steps: int, **others: Any) -> None:
        super().__init__(**others)
        self.total = total_num_steps

    def after(self) -> float:
        return max(0.0, (self.total - self.iteration) / max(1.0, self.total - self.steps))


class WarmupCosineLR(WarmupLR):
    def __init__(
        self,
        lr: float,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        super().__init__(warmup_min_ratio * lr, lr, warmup_num_steps, warmup_type)
        self.total, self.ratio = total_num_steps, cos_min_ratio

    def change(self) -> None:
        if self.iteration < self.steps:
            super().change()
            return
        done = (self.iteration - self.steps + 1) / (self.total - self.steps)
        self.lr = self.high * max(0.0, self.ratio + (1 - self.ratio) * (1 + math.cos(math.pi * done)) / 2)


class OneCycle(Schedule):
    def __init__(
        self,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        **unused: object,
    ) -> None:
        super().__init__()
        self.lows, self.highs = (cycle_min_lr, cycle_max_mom), (cycle_max_lr, cycle_min_mom)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.total, self.up_share = (
            cycle_first_step_size + second,
            cycle_first_step_size / (cycle_first_step_size + second),
        )
        self.decay_rate, self.decay_steps, self.cycles = decay_lr_rate, decay_step_size, cycle_momentum
        self.lr, self.beta1 = cycle_min_lr, cycle_max_mom if cycle_momentum else None

    def change(self) -> None:
        if self.iteration >= self.total:
            past = self.iteration - self.total + 1
            self.lr = (
                self.lows[0] / (1 + self.decay_rate * past / self.decay_steps) if self.decay_steps else self.lows[0]
            )
            self.beta1 = self.lows[1] if self.cycles else None
            return
        share = (self.iteration + 1) / self.total
        x = 1 + share - math.floor(1 + share)
        scale = x / self.up_share if x <= self.up_share else (x - 1) / (self.up_share - 1)
        self.lr = self.lows[0] + (self.highs[0] - self.lows[0]) * scale
        self.beta1 = self.lows[1] - (self.lows[1] - self.highs[1]) * scale if self.cycles else None


class LRRangeTest(Schedule):
    def __init__(
        self,
        lr_range_test_min_lr: float = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        super().__init__()
        self.least, self.size, self.rate = lr_range_test_min_lr, lr_range_test_step_size, lr_range_test_step_rate
        self.staircase, self.lr = lr_range_test_staircase, lr_range_test_min_lr

    def change(self) -> None:
        intervals = (self.iteration + 1) / self.size
        self.lr = self.least * (1 + self.rate * (math.floor(intervals) if self.staircase else intervals))


SCHEDULES: Mapping[str, type[Schedule]] = {
    one.__name__: one for one in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


class LossScaler:
    """The fields of `fp16`. `scale` is that of the next step; `update` is called after each."""

    def __init__(
        self,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1,
        **unused: object,
    ) -> None:
        self.is_dynamic = loss_scale == 0
        self.scale: float = 2.0**initial_scale_power if self.is_dynamic else loss_scale
        self.window, self.shift, self.consecutive = loss_scale_window, hysteresis, consecutive_hysteresis
        self.least, self.left, self.iteration, self.last_overflow = min_loss_scale, hysteresis, 0, -1

    def update(self, overflow: bool) -> None:
        if not self.is_dynamic:
            return
        if overflow:
            if self.shift == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.least)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.left = self.shift
            if (self.iteration - self.last_overflow) % self.window == 0:
                if not self.consecutive:
                    self.left = self.shift
                self.scale *= 2
        self.iteration += 1
