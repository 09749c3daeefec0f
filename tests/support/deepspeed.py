"""What DeepSpeed's documentation says of its schedules, its loss scaler and its training step, in plain PyTorch. It
imports nothing of sambasim. A schedule is stepped after each optimizer step that was not skipped."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


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


class Net(nn.Module):
    """A classifier that returns its loss, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return nn.functional.cross_entropy(self.second(hidden).float(), label)


def samples() -> Dataset[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(400, 6, generator=generator)
    return TensorDataset(x, (x @ torch.randn(6, 4, generator=generator)).argmax(1))


class Record(NamedTuple):
    """What one step did. `norm` is that of gradients before they are clipped; an overflow has None."""

    loss: float
    lr: float
    norm: float | None
    scale: float


def batch_sizes(config: Mapping[str, Any], world: int) -> tuple[int, int]:
    """Micro-batch and accumulation steps, of which DeepSpeed works out what is missing."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (config.get(name) or 0 for name in names)
    micro = micro or whole // world // (steps or 1)
    return micro, steps or (whole // micro // world if whole else 1)


def train(config: Mapping[str, Any], weights: Mapping[str, Tensor], world: int, steps: int) -> tuple[list[Record], Net]:
    """Train from `weights` as a config without `auto` says, with all replicas in one process: replica r has samples r,
    r + world, … in their order."""
    micro, accumulation = batch_sizes(config, world)
    half = {name: config.get(name, {}).get("enabled", False) for name in ("fp16", "bf16")}
    dtype = torch.float16 if half["fp16"] else torch.bfloat16 if half["bf16"] else torch.float32
    net = Net()
    net.load_state_dict(weights)
    masters = [nn.Parameter(one.detach().float().clone()) for one in net.parameters()]
    net.to(dtype)
    optimizer = make_optimizer(config["optimizer"], masters)
    chosen = config.get("scheduler")
    schedule = None
    if chosen is not None:
        lr = {"lr": config["optimizer"]["params"]["lr"]} if chosen["type"] == "WarmupCosineLR" else {}
        schedule = SCHEDULES[chosen["type"]](**lr, **chosen["params"])
    scaler = LossScaler(**config["fp16"]) if half["fp16"] else LossScaler(loss_scale=1)
    x, label = (torch.stack(column) for column in zip(*iter_samples(), strict=True))
    records = []
    for step in range(steps):
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = schedule.lr
            if schedule.beta1 is not None and "betas" in optimizer.param_groups[0]:
                optimizer.param_groups[0]["betas"] = (schedule.beta1, 0.99)
        total = 0.0
        sums = [torch.zeros_like(one) for one in net.parameters()]  # in their own type, in which they may overflow
        for replica in range(world):
            net.zero_grad()
            for number in range(accumulation):
                first = (step * accumulation + number) * micro
                mine = torch.arange(first, first + micro) * world + replica
                loss = net(x[mine], label[mine])
                torch.autograd.backward(loss * scaler.scale / accumulation)
                total += loss.item() / accumulation / world
            for added, parameter in zip(sums, net.parameters(), strict=True):
                assert parameter.grad is not None
                added += parameter.grad
        sums = [one.float() / world / scaler.scale for one in sums]
        norm = math.sqrt(sum(float(one.double().square().sum()) for one in sums))
        overflow = not math.isfinite(norm)
        records.append(Record(total, optimizer.param_groups[0]["lr"], None if overflow else norm, scaler.scale))
        scaler.update(overflow)
        if overflow:
            continue
        bound = config.get("gradient_clipping", 0.0)
        for master, gradient in zip(masters, sums, strict=True):
            master.grad = gradient * min(bound / (norm + 1e-6), 1.0) if bound else gradient
        optimizer.step()
        if schedule is not None:
            schedule.step()
        for parameter, master in zip(net.parameters(), masters, strict=True):
            parameter.data.copy_(master.data)
    return records, net


def iter_samples() -> list[tuple[Tensor, ...]]:
    data = samples()
    return [data[index] for index in range(400)]


def make_optimizer(chosen: Mapping[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    given = dict(chosen["params"])
    if chosen["type"] == "SGD":
        return torch.optim.SGD(parameters, **given)
    decoupled, of_torch = given.pop("adam_w_mode", True), given.pop("torch_adam", False)
    make = torch.optim.AdamW if decoupled or chosen["type"] == "AdamW" else torch.optim.Adam
    if not of_torch:
        given = {"weight_decay": 0.0, **given}
    return make(parameters, **given)
