"""Recomputed activations: the same bits, and less to keep."""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sambasim.compiler.build import Built
from sambasim.compiler.passes import Partition, Recompute, pipeline, run_pipeline
from sambasim.ir.dataflow import is_view
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.ranks import of_ranks
from sambasim.ir.schedule import ActionKind, in_flight
from sambasim.ir.verify import Progress, verify
from sambasim.runtime.engine.executor import Executor, tangent_of
from sambasim.runtime.transports.in_process import finished
from sambasim.runtime.values.memory import DeviceMemory, place_inputs, place_weights
from tests.compiler.pipeline import test_pipeline_parallel as pipe
from tests.compiler.sharding.test_plan import built_from, placed
from tests.support.compiled import outputs_of
from tests.support.examples import example_options
from tests.support.whole import whole_case

Between = Literal["sections", "full"]


def dropping(net: Any, x: Tensor, target: Tensor) -> Tensor:
    """Each layer drops another share: the last bit of the scale depends on it."""
    for layer, share in zip(net.layers, (0.3, 0.15, 0.45, 0.1, 0.04, 0.52), strict=True):
        x = F.dropout(net.norm(layer(x)).tanh(), share, training=net.training)
    return F.mse_loss(x, target)


def in_a_row(net: Any, x: Tensor, target: Tensor) -> Tensor:
    for layer in net.layers:
        x = F.gelu(layer(x))
    return F.mse_loss(x, target)


def not_dropping(net: Any, x: Tensor, target: Tensor) -> Tensor:
    for layer in net.layers:
        x = torch.native_dropout(layer(x).tanh(), 0.5, False)[0].sin()
    return F.mse_loss(x, target)


def recomputed(program: Program, between: Between) -> Program:
    if between == "sections":
        program = Partition("o1", pipe.BUDGET)(program)
    found = Recompute(between)(program)
    verify(found, Progress.CAPTURED)
    return found


def kept_bytes(program: Program) -> int:
    """Of the values of the forward that the backward reads, or reads views of."""
    training = program.step
    stop = max(one.stop for one in training.sections if one.kind is SectionKind.FWD)
    viewed: dict[str | None, str | None] = {}
    for node in training.nodes[:stop]:
        base = viewed.get(next(iter(node.reads), None))
        viewed |= {name: base if is_view(node) else name for name in node.results}
    read = {viewed.get(name) for node in training.nodes[stop:] for name in node.reads} - {None}
    return sum(training.values[name].size_bytes for name in read if name is not None)


def same_bits(built: Built, batches: list[pipe.Batch], between: Between) -> None:
    again = Built(recomputed(built.program, between), built.weights)
    pipe.check_equal(pipe.accumulated(again, batches), pipe.accumulated(built, batches))


@pytest.mark.parametrize("between", ["sections", "full"])
@pytest.mark.parametrize("name", ["char_gpt", whole_case("resnet"), "digits", "lstm_classifier"])
def test_an_example_keeps_less_and_has_the_same_bits(name: str, between: Between) -> None:
    built, batches = pipe.rolled(name)
    same_bits(built, batches[:2], between)
    assert kept_bytes(recomputed(built.program, between)) <= kept_bytes(built.program)


@cache
def dropped(dtype: torch.dtype) -> tuple[Built, pipe.Batch]:
    torch.manual_seed(0)
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    model = pipe.layers(8, 6, dropping, norm=nn.BatchNorm1d(8)).to(dtype)
    return built_from(model, x=x.to(dtype), target=target.to(dtype))


@pytest.mark.parametrize("between", ["sections", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_made_again_by_its_mask(dtype: torch.dtype, between: Between) -> None:
    built, inputs = dropped(dtype)
    same_bits(built, [inputs], between)
    assert kept_bytes(recomputed(built.program, "full")) < 0.6 * kept_bytes(built.program)


def averaging(net: Any, x: Tensor, target: Tensor) -> Tensor:
    """Scales by a buffer that it changes afterwards."""
    for layer in net.layers:
        x = torch.tanh(layer(x) * net.norm.running_mean.clone())
    with torch.no_grad():
        net.norm.running_mean.mul_(0.9).add_(0.1 * x.abs().mean(0))
    return F.mse_loss(x, target)


@pytest.mark.parametrize("between", ["sections", "full"])
def test_an_app_that_runs_the_backward_apart_has_the_same_gradients(between: Between) -> None:
    """There, a buffer has its new value before the backward repeats operators that have read the old one."""
    built, (inputs, *_) = pipe.with_batches(pipe.layers(8, 4, averaging, norm=nn.BatchNorm1d(8)), 16, 8)
    program = placed(recomputed(built.program, between))
    training = program.step
    found = []
    for apart in (False, True):
        memory = DeviceMemory.private(program)
        place_weights(memory, built.weights)
        place_inputs(memory, inputs)
        executor, tangent = Executor(training, program, memory.tensor), tangent_of(program, 1.0)
        if apart:
            finished(executor.run(only=ActionKind.FORWARD))
            finished(executor.run(tangent, only=ActionKind.BACKWARD))
        else:
            outputs_of(executor, tangent)
        found.append([memory.region(group, "gradient").clone() for group in program.groups])
    assert all(map(torch.equal, *found))


RANKS = 2


@pytest.mark.parametrize(
    ("name", "schedule", "between"),
    [
        ("char_gpt", "1f1b", "sections"),
        ("char_gpt", "zb-h1", "full"),
        ("shared", "interleaved-1f1b", "sections"),
        # test_pipeline trains these by ranks of their own
        whole_case("char_gpt", "1f1b", "full"),
        whole_case("char_gpt", "zb-h1", "sections"),
        whole_case("shared", "interleaved-1f1b", "full"),
    ],
)
def test_stages_recompute_too(name: str, schedule: str, between: Between) -> None:
    built, batches = pipe.shared() if name == "shared" else pipe.rolled(name)
    program = recomputed(pipe.cut(built, RANKS, schedule), between)
    assert_repeats(program)
    pipe.check_equal(pipe.pipelined(built, batches, program), pipe.accumulated(built, batches))


def assert_repeats(program: Program) -> None:
    """Something is computed again, and each operator on the rank that has computed it before."""
    rank_of = {
        node.name: rank
        for rank, part in enumerate(of_ranks(program))
        if part.training is not None
        for node in part.training.nodes
    }
    repeated = [name for name in rank_of if name.endswith("__again") and name.removesuffix("__again") in rank_of]
    assert repeated
    assert all(rank_of[name] == rank_of[name.removesuffix("__again")] for name in repeated)


def held_bytes(built: Built, schedule: str, recompute: str) -> list[int]:
    """By rank: what it holds between passes, and for the micro-batches in flight."""
    parallel = (f"pipeline_stages={RANKS}", f"micro_batches={pipe.MICRO_BATCHES}", f'schedule="{schedule}"')
    flags = (f"parallel.{flag}" for flag in (*parallel, f'recompute="{recompute}"'))
    options = example_options("char_gpt", Path(), *flags, data_parallel=False, batch_size=4 * pipe.MICRO_BATCHES)
    program, found = run_pipeline(built.program, pipeline(options), lambda title: None), []
    assert program.schedule is not None
    for rank, count in enumerate(in_flight(program.schedule)):
        own = of_ranks(program)[rank]
        sizes = [symbol.type.size_bytes for symbol in own.symbols.values() if symbol.offset is not None]
        found.append(sum(sizes) + count * kept_bytes(own))
    return found


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("char_gpt", "1f1b"), ("char_gpt", "zb-h1"), ("mlp", "interleaved-1f1b"), ("mlp", "1f1b"),
        ("resnet", "1f1b"), ("resnet", "zb-h1"),
        whole_case("char_gpt", "interleaved-1f1b"), whole_case("mlp", "zb-h1"),
        whole_case("resnet", "interleaved-1f1b"),
    ],
)  # fmt: skip
def test_no_rank_of_a_pipeline_holds_more(name: str, schedule: str) -> None:
    """A stage that gains nothing does not recompute: all of resnet, by `sections`."""
    built, _ = pipe.with_batches(pipe.layers(64, 6, in_a_row), 4, 64) if name == "mlp" else pipe.rolled(name)
    without, sections, full = (held_bytes(built, schedule, one) for one in ("none", "sections", "full"))
    for found in (sections, full):
        assert all(now <= before for now, before in zip(found, without, strict=True))
    assert full < without
    assert sections < without or name == "resnet"


def test_dropout_that_is_off_stays_off() -> None:
    built, batches = pipe.with_batches(pipe.layers(8, 6, not_dropping), 16, 8)
    same_bits(built, batches[:1], "full")
