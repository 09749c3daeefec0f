"""What DeepSpeed's documentation says of its schedules, its loss scaler and its training step, in plain PyTorch. It
imports nothing of sambasim. A schedule is stepped after each optimizer step that was not skipped."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Schedule:
    """The learning rate `lr` and `beta1` (None: not changed) of the next step."""

    iteration = -1

    def step(self) -> None:
        self.iteration += 1

    @property
    def lr(self) -> float:
        raise NotImplementedError

    @property
    def beta1(self) -> float | None:
        return None


@dataclass
class WarmupLR(Schedule):
    warmup_min_lr: float = 0.0
    warmup_max_lr: float = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        self.steps = max(2, self.warmup_num_steps)

    @property
    def lr(self) -> float:
        return self.warmup_min_lr + (self.warmup_max_lr - self.warmup_min_lr) * self.gamma()

    def gamma(self) -> float:
        done = max(0, self.iteration)
        if done >= self.steps:
            return self.after()
        return math.log(done + 1) / math.log(self.steps) if self.warmup_type == "log" else done / self.steps

    def after(self) -> float:
        return 1.0


@dataclass(kw_only=True)
class WarmupDecayLR(WarmupLR):
    total_num_steps: int

    def after(self) -> float:
        return max(0.0, (self.total_num_steps - self.iteration) / max(1.0, self.total_num_steps - self.steps))


class WarmupCosineLR(WarmupLR):
    def __init__(
        self, lr: float, total_num_steps: int, warmup_min_ratio: float = 0.0, cos_min_ratio: float = 1e-4, **others: Any
    ) -> None:
        super().__init__(warmup_min_ratio * lr, lr, **others)
        self.total, self.ratio = total_num_steps, cos_min_ratio

    @property
    def lr(self) -> float:
        if self.iteration < self.steps:
            return super().lr
        done = (self.iteration - self.steps + 1) / (self.total - self.steps)
        return self.warmup_max_lr * max(0.0, self.ratio + (1 - self.ratio) * (1 + math.cos(math.pi * done)) / 2)


@dataclass
class OneCycle(Schedule):
    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9

    def __post_init__(self) -> None:
        self.total = self.cycle_first_step_size + (self.cycle_second_step_size or self.cycle_first_step_size)

    def scale(self) -> float:
        """Of the next step, from 0 up to 1 and down again."""
        if self.iteration >= self.total:
            return 0.0
        share, up_share = (self.iteration + 1) / self.total % 1, self.cycle_first_step_size / self.total
        return share / up_share if share <= up_share else (share - 1) / (up_share - 1)

    @property
    def lr(self) -> float:
        past = max(0, self.iteration - self.total + 1)
        least = self.cycle_min_lr / (1 + self.decay_lr_rate * past / (self.decay_step_size or math.inf))
        return least + (self.cycle_max_lr - least) * self.scale()

    @property
    def beta1(self) -> float | None:
        momentum = self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self.scale()
        return momentum if self.cycle_momentum else None


@dataclass
class LRRangeTest(Schedule):
    lr_range_test_min_lr: float = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    @property
    def lr(self) -> float:
        intervals = (self.iteration + 1) / self.lr_range_test_step_size
        intervals = math.floor(intervals) if self.lr_range_test_staircase else intervals
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * intervals)


SCHEDULES: Mapping[str, type[Schedule]] = {
    one.__name__: one for one in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


@dataclass
class LossScaler:
    """The fields of `fp16`. `scale` is that of the next step; `update` is called after each."""

    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1
    enabled: bool = True

    def __post_init__(self) -> None:
        self.is_dynamic = self.loss_scale == 0
        self.scale: float = 2.0**self.initial_scale_power if self.is_dynamic else self.loss_scale
        self.left, self.iteration, self.last_overflow = self.hysteresis, 0, -1

    def update(self, overflow: bool) -> None:
        if not self.is_dynamic:
            return
        if overflow:
            if self.hysteresis == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.min_loss_scale)
            else:
                self.left -= 1
            self.last_overflow = self.iteration
        else:
            is_window = (self.iteration - self.last_overflow) % self.loss_scale_window == 0
            if self.consecutive_hysteresis or is_window:
                self.left = self.hysteresis
            self.scale *= 2 if is_window else 1
        self.iteration += 1


class Net(nn.Module):
    """A classifier that returns its loss, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        return nn.functional.cross_entropy(self.second(hidden).float(), label)


def samples() -> TensorDataset:
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
    x, label = samples().tensors
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


def make_optimizer(chosen: Mapping[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    given = dict(chosen["params"])
    if chosen["type"] == "SGD":
        return torch.optim.SGD(parameters, **given)
    decoupled, of_torch = given.pop("adam_w_mode", True), given.pop("torch_adam", False)
    make = torch.optim.AdamW if decoupled or chosen["type"] == "AdamW" else torch.optim.Adam
    if not of_torch:
        given = {"weight_decay": 0.0, **given}
    return make(parameters, **given)
