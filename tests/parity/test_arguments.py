"""What a run gives parameters of forward and of the loss: the step, the epoch, the progress and scheduled numbers, as
an eager loop gives them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sambasim as ss
from sambasim.compiler.capture.step import Example
from sambasim.compiler.front import inputs_of
from sambasim.errors import CaptureError, DataError, OptionError, PefError, SambasimError
from sambasim.options.base import build
from sambasim.options.compile import CompileOptions
from sambasim.options.run import RunOptions, resolve_run
from sambasim.options.training import Sections
from tests.pef.damage import change_fields
from tests.support.compiled import compile_model, net_options

BATCH, STEPS, WARMUP = 8, 6, 4
BETA = {"schedule": "linear", "from": 0.5, "to": 1.0, "steps": WARMUP}


class Coder(nn.Module):
    """An autoencoder with a KL term that warms up, and a later one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.decode = nn.Linear(4, 6), nn.Linear(3, 4)

    def forward(self, x: Tensor, *, step: Tensor, schedule_kl: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, 1)
        kl = (mean * mean + log.exp() - log - 1).mean()
        return self.decode(mean), schedule_kl * kl, torch.where(step >= 3, mean.abs().mean(), 0.0)


def loss_of(result: tuple[Tensor, Tensor, Tensor], target: Tensor, progress: Tensor, epoch: Tensor) -> Tensor:
    decoded, kl, late = result
    return (decoded - target).square().mean() * (1 + progress) + kl + late + 0.1 * epoch * decoded.mean()


def samples(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return x, x.roll(1, 1)


def value(model: nn.Module, batch: tuple[Tensor, Tensor], step: int, epoch: int, done: int) -> Tensor:
    beta = torch.tensor(0.5 + 0.5 * min(step / WARMUP, 1.0))
    result = model(batch[0], step=torch.tensor(step), schedule_kl=beta)
    return loss_of(result, batch[1], torch.tensor(done / STEPS), torch.tensor(epoch))


def eager(model: nn.Module, x: Tensor, y: Tensor, size: int) -> list[float]:
    """The losses of two epochs; a step whose loss is not finite is skipped, and does not count."""
    optimizer, losses, step = torch.optim.SGD(model.parameters(), lr=0.1), [], 0
    for done in range(STEPS):
        epoch, at = divmod(done, STEPS // 2)
        loss = value(model, (x[at * size : at * size + size], y[at * size : at * size + size]), step, epoch, done)
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if loss.isfinite():
            optimizer.step()
            step += 1
    return losses


@pytest.fixture(scope="module")
def pefs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ss.Pef]:
    made, folder = {}, tmp_path_factory.mktemp("arguments")
    for name, more in {"plain": {}, "pipeline": {"pipeline_stages": 2, "micro_batches": 2}}.items():
        given: dict[str, Any] = {"data_parallel": True, "output_folder": folder, "quiet": True, "check": 1, **more}
        table: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "arguments": {"schedule_kl": BETA}}
        made[name] = ss.compile(Coder(), samples(BATCH), loss=loss_of, name=name, **table, **given)
    return made


def trained(pef: ss.Pef | Path, data: object, **more: Any) -> ss.Run:
    return ss.run(pef, data, **{"epochs": 2, "threads": 1, "quiet": True, "set": {"data.shuffle": False}, **more})


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "1": ("plain", {"replicas": 1}),
    "2": ("plain", {"replicas": 2}),
    "2 micro-steps": ("plain", {"replicas": 1, "grad_accumulation_steps": 2}),
    "pipeline": ("pipeline", {"replicas": 1}),
    "skips": ("plain", {"replicas": 1, "on_nonfinite": "skip"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_those_of_an_eager_loop(pefs: dict[str, ss.Pef], layout: str) -> None:
    name, run = LAYOUTS[layout]
    size = BATCH * (1 + layout.startswith("2"))
    (x, y), held_out, model = samples(size * STEPS // 2), samples(24), Coder()
    if layout == "skips":
        y[1] = torch.nan
    wanted = eager(model, x, y, size)
    found = trained(pefs[name], ((x, y), held_out), **run)
    assert found.losses == pytest.approx(wanted, rel=1e-5, nan_ok=True)
    skipped = 2 if layout == "skips" else 0
    with torch.no_grad():
        last = value(model.eval(), held_out, STEPS - skipped, 1, STEPS)
    assert found.evaluations[-1].loss == pytest.approx(float(last), rel=1e-5)
    if layout == "1":
        assert found.losses == wanted
        assert all(torch.equal(found.weights[name], one) for name, one in model.state_dict().items())
        predicted = ss.predict(pefs[name], held_out, weights=found, threads=1)
        with torch.no_grad():  # after the training: a warm-up is over, and counts of steps and epochs are not known
            decoded, kl, _ = model(held_out[0], step=torch.tensor(0), schedule_kl=torch.tensor(1.0))
            after = (decoded - held_out[1]).square().mean() * 2 + kl
        assert predicted.loss == pytest.approx(float(after), rel=1e-5)


def test_a_resumed_run_has_the_same_bits_and_a_run_may_change_numbers(pefs: dict[str, ss.Pef], tmp_path: Path) -> None:
    saving = {"checkpoint_dir": tmp_path, "checkpoint_every": "2steps", "keep": 9}
    whole = trained(pefs["plain"], samples(BATCH * STEPS // 2), replicas=1, **saving)
    rest = {"resume": str(tmp_path / "step-0000000002"), "exact": True}
    resumed = trained(pefs["plain"], samples(BATCH * STEPS // 2), replicas=1, **rest)
    assert resumed.summary.weights_sha256 == whole.summary.weights_sha256
    with pytest.raises(SambasimError, match=r"exact.*training\.epochs"):
        trained(pefs["plain"], samples(BATCH * STEPS // 2), replicas=1, epochs=3, **rest)
    other = {"data.shuffle": False, "arguments.schedule_kl.to": 3.0}
    changed = trained(pefs["plain"], samples(BATCH * STEPS // 2), replicas=1, set=other)
    assert changed.losses[0] == whole.losses[0]
    assert changed.losses[2] > whole.losses[2]


def test_arguments_of_another_type_are_refused(pefs: dict[str, ss.Pef], tmp_path: Path) -> None:
    path = tmp_path / "other.pef"
    path.write_bytes(pefs["plain"].path.read_bytes())
    change_fields(path, lambda fields: fields["training_defaults"]["arguments"]["progress"].update(schedule="step"))
    with pytest.raises(PefError, match="does not say what its argument progress is"):
        trained(path, samples(BATCH), trust=True)


def options(**tables: object) -> CompileOptions:
    return CompileOptions.model_validate({"optimizer": {"name": "sgd"}, **tables})


class Middle(nn.Module):
    def forward(self, x: Tensor, step: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum() + step


class AtTheEnd(nn.Module):
    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return x.sum() + step.sum()


class WithDefault(nn.Module):
    def forward(self, x: Tensor, beta: float = 1.0, step: int = 0) -> Tensor:
        return x.sum() * beta + step


class Rest(nn.Module):
    def forward(self, *inputs: Tensor, epoch: Tensor) -> Tensor:
        return inputs[0].sum() + inputs[1].sum() + epoch


class Keywords(nn.Module):
    def forward(self, input_ids: Tensor | None = None, scale: Tensor | None = None, **others: Tensor) -> Tensor:
        assert input_ids is not None
        assert scale is not None
        return input_ids.sum() * scale


X, Y = torch.ones(2, 3), torch.full((2, 3), 2.0)
PLACES: dict[str, tuple[nn.Module, Any, dict[str, object], tuple[str, ...], float]] = {
    "between values": (Middle(), (X, Y), {}, ("step",), 18.0 + 7),
    "the data has it": (AtTheEnd(), (X, Y), {}, (), 18.0),
    "the data has it by name": (AtTheEnd(), {"x": X, "step": Y}, {}, (), 18.0),
    "left to the run": (AtTheEnd(), {"x": X}, {}, ("step",), 6.0 + 7),
    "in the table, not of a tuple": (AtTheEnd(), (X,), {"step": 0.5}, ("step",), 6.0 + 7),
    "a default stays": (WithDefault(), (X,), {}, (), 6.0),
    "a default in the table": (WithDefault(), (X,), {"beta": 0.5, "step": "step"}, ("beta", "step"), 42.0 + 7),
    "beside *inputs": (Rest(), (X, Y), {}, ("epoch",), 18.0 + 7),
    "beside keywords": (Keywords(), {"input_ids": X}, {"scale": "progress"}, ("scale",), 42.0),
    "values skip it": (Keywords(), (X,), {"scale": 2}, ("scale",), 42.0),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_gives_what_the_data_leaves(place: str) -> None:
    model, batch, table, of_run, wanted = PLACES[place]
    notices: list[str] = []
    example = inputs_of(batch, model, None, options(arguments=table), notices.append)
    assert example.of_run == of_run
    assert float(example.call(model, [*example.inputs.values()], dict.fromkeys(of_run, torch.tensor(7)))) == wanted
    told = "forward() keeps the default of step: --set arguments.step=step gives it that of the training"
    assert notices == [told] * (place == "a default stays")


def test_what_still_misses_is_an_error() -> None:
    with pytest.raises(DataError, match=r"forward\(x, y\) needs y, and a sample gives x"):
        inputs_of((X,), Middle(), None, options())


@pytest.mark.parametrize(
    ("then", "table", "text"),
    [
        (lambda net, x, step: net.w(x) * 2 if step > 3 else net.w(x), {}, r"branch on the value.*\n.*\n.*torch.where"),
        (lambda net, x, step: net.w(x) * step.add_(1), {}, "an input that is changed in place"),
        (lambda net, x, step: net.w(x) * step, {"gamma": 1.0}, r"arguments.gamma is no parameter .*: .* takes x, step"),
    ],
)
def test_what_cannot_be_is_refused(then: Any, table: dict[str, object], text: str, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(3, 3)

        def forward(self, x: Tensor, step: Tensor) -> Tensor:
            result: Tensor = then(self, x, step).square().mean()
            return result

    example = Example({"x": X}, by_keyword=True, of_run=("step",))
    with pytest.raises((CaptureError, OptionError), match=text):
        compile_model(Net(), example, net_options(tmp_path, arguments=table))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"schedule": "step", "to": 1.0}, "arguments.beta.to = 1.0: is not for step"),
        ({"schedule": "constant", "steps": 5}, "arguments.beta.steps = 5: is not for constant"),
        ({"schedule": "linear", "end": 1.0}, "arguments.beta.end: is not an option; they are schedule, from, to and"),
        ({"to": 1.0}, "arguments.beta.schedule: is missing"),
        ("polynomial", 'arguments.beta.schedule = "polynomial": must be constant, linear, cosine, step, epoch or'),
        ([1.0], "arguments.beta.to.*: must be a number"),
    ],
)
def test_tables_that_mean_nothing_are_refused(given: object, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        build(Sections, {"arguments": {"beta": given}})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"gamma": 1.0}, "arguments.gamma: is no argument of the compiled"),
        ({"beta": "step"}, "was compiled as float32"),
    ],
)
def test_a_run_changes_numbers_only(changes: dict[str, object], text: str) -> None:
    stored = options(arguments={"beta": BETA}).training_defaults()
    with pytest.raises(OptionError, match=text):
        resolve_run(RunOptions.model_validate({"pef": "x", "overrides": {"arguments": changes}}), stored, {})


def test_a_cosine_goes_half_of_the_way_in_half_of_the_training() -> None:
    table = build(Sections, {"arguments": {"beta": {"schedule": "cosine", "from": 1.0, "to": 3.0}}})
    values = [table.arguments["beta"].at(0, 0, part) for part in (0.0, 0.25, 0.5, 1.0)]
    assert values == pytest.approx([1.0, 2 - 2**-0.5, 2.0, 3.0])
