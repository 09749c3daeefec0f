"""What DeepSpeed's documentation says of its schedules, its loss scaler and its training step, in plain PyTorch. It
imports nothing of sambasim. A schedule is stepped after each optimizer step that was not skipped."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Rates = tuple[float, float | None]
"""The learning rate, and beta1 (None: not changed)."""


def warmup_lr(
    done: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    after: float = 1.0,
) -> Rates:
    """`after`: the share of the rate when the warm-up is over."""
    done, steps = max(0, done), max(2, warmup_num_steps)
    risen = math.log(done + 1) / math.log(steps) if warmup_type == "log" else done / steps
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * (risen if done < steps else after), None


def warmup_decay_lr(done: int, total_num_steps: int, warmup_num_steps: int = 1000, **others: Any) -> Rates:
    left = max(0.0, (total_num_steps - done) / max(1.0, total_num_steps - max(2, warmup_num_steps)))
    return warmup_lr(done, warmup_num_steps=warmup_num_steps, after=left, **others)


def warmup_cosine_lr(
    done: int,
    lr: float,
    total_num_steps: int,
    warmup_num_steps: int = 1000,
    warmup_min_ratio: float = 0.0,
    cos_min_ratio: float = 1e-4,
    **others: Any,
) -> Rates:
    steps = max(2, warmup_num_steps)
    if done < steps:
        return warmup_lr(done, warmup_min_ratio * lr, lr, warmup_num_steps, **others)
    passed = (done - steps + 1) / (total_num_steps - steps)
    return lr * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * passed)) / 2), None


def one_cycle(
    done: int,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
) -> Rates:
    total = cycle_first_step_size + (cycle_second_step_size or cycle_first_step_size)
    share, up_share = (done + 1) / total % 1, cycle_first_step_size / total
    scale = share / up_share if share <= up_share else (share - 1) / (up_share - 1)
    scale = scale if done < total else 0.0  # from 0 up to 1 and down again
    past = max(0, done - total + 1)
    least = cycle_min_lr / (1 + decay_lr_rate * past / (decay_step_size or math.inf))
    momentum = cycle_max_mom - (cycle_max_mom - cycle_min_mom) * scale
    return least + (cycle_max_lr - least) * scale, momentum if cycle_momentum else None


def lr_range_test(
    done: int,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Rates:
    intervals = (done + 1) / lr_range_test_step_size
    intervals = math.floor(intervals) if lr_range_test_staircase else intervals
    return lr_range_test_min_lr * (1 + lr_range_test_step_rate * intervals), None


SCHEDULES: Mapping[str, Callable[..., Rates]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "OneCycle": one_cycle,
    "LRRangeTest": lr_range_test,
}
"""What the next step has after so many that were not skipped, less one, and the fields of `params`."""


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
    chosen, done = config.get("scheduler"), -1
    scaler = LossScaler(**config["fp16"]) if half["fp16"] else LossScaler(loss_scale=1)
    x, label = samples().tensors
    records = []
    for step in range(steps):
        if chosen is not None:
            lr = {"lr": config["optimizer"]["params"]["lr"]} if chosen["type"] == "WarmupCosineLR" else {}
            optimizer.param_groups[0]["lr"], beta1 = SCHEDULES[chosen["type"]](done, **lr, **chosen["params"])
            if beta1 is not None and "betas" in optimizer.param_groups[0]:
                optimizer.param_groups[0]["betas"] = (beta1, 0.99)
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
        done += 1
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
