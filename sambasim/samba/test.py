"""Checks of device results: `assert_close`, `TestWithGold`, `consistency_test`, and reports in JSON."""

import functools
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from pydantic import JsonValue
from pydantic_core import to_json
from torch import Tensor, nn

from sambasim.compiler.capture.tensors import held_by
from sambasim.errors import DataError, OptionError, WeightsError, failing_with
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.ranks import as_one_rank
from sambasim.ir.types import SymbolKind
from sambasim.pef import locate, read
from sambasim.pef.archive import bytes_of
from sambasim.runtime.values.memory import read_tensors, write_tensors
from sambasim.samba import ending, process
from sambasim.samba.device import DEVICE_STATE, rates_of
from sambasim.samba.inputs import Inputs, inputs_of, repeatable
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import app_error
from sambasim.samba.request import Optimizer
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor, host_values, to_torch
from sambasim.samba.trace import trace_graph

__all__ = [
    "MAX_BF16_TRUNCATE_NORMAL_REL", "AccuracyReport", "TestWithGold", "assert_close", "consistency_test",
    "dump_accuracy_debug_info",
]  # fmt: skip

Results: TypeAlias = Sequence[tuple[str, Tensor]]
Check: TypeAlias = Callable[..., Results]

_INPUT, _OUTPUT = "input.", "output."


class TestWithGold:
    """A test of a PEF: `TestWithGold(args, "logreg", model, None, optimizer).test()`.

    A gold file has one batch and PyTorch's results. The first test writes it, and later ones compare with it.

    args: with `gold_file_path`, a .safetensors file; None to compute on the host each time
    inputs: one batch; None for that of `trace_graph`, or, if no PEF is loaded, for seeded numbers with `args.pef`
    optimizer: what the PEF was compiled with; None for an inference PEF
    threshold, rtol: as for `utils.assert_close`"""

    __test__ = False  # pytest collects classes of such names

    def __init__(
        self,
        args: Namespace,
        name: str,
        model: nn.Module,
        inputs: Inputs | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        threshold: float = 3e-3,
        rtol: float = 0.0,
    ) -> None:
        path = getattr(args, "gold_file_path", None)
        self.gold_file_path = None if path is None else Path(path)
        self._args, self._name, self._model, self._optimizer = args, name, model, optimizer
        self._inputs = None if inputs is None else repeatable(inputs)
        self._bounds = threshold, rtol

    def test(self) -> dict[str, Tensor]:
        """Copies the weights to the host, and compares the outputs of FWD on the device with the gold file; writes it
        from the host's outputs if there is none. Returns the gold outputs by name. Raises AssertionError as
        `utils.assert_close` does, and WeightsError for a file of other outputs."""
        batch, gold = self._batch(), None
        if self.gold_file_path is not None and self.gold_file_path.exists():
            gold = read_tensors(self.gold_file_path, "delete it to write a new one")
            batch = _under(_INPUT, gold)
        session.to_cpu(self._model)
        device = {str(one.sn_name): one for one in session.run(batch, section_types=[SectionKind.FWD])}
        expected = self._write(batch, [*device]) if gold is None else _under(_OUTPUT, gold)
        if expected.keys() != device.keys():
            what = f"{self.gold_file_path} holds {', '.join(expected)}, and the PEF's outputs are {', '.join(device)}"
            raise WeightsError(what, remedy="give the gold file of this model, or delete it to write a new one")
        for name, value in device.items():
            assert_close(value, expected[name], f"{self._name}: {name}", *self._bounds)
        return expected

    def _batch(self) -> Mapping[str, Tensor]:
        """One batch, by the names of the PEF's inputs; the PEF is loaded when this returns."""
        try:
            now = session.loaded(self._model)
        except OptionError:
            made_up = _made_up(as_one_rank(read(locate(self._args.pef)).program)).items()
            named = [SambaTensor(tensor, name=name, batch_dim=0) for name, tensor in made_up]
            inputs = named if self._inputs is None else self._inputs
            trace_graph(self._model, inputs, self._optimizer, pef=self._args.pef)
            now = session.loaded(self._model)
        return now.inputs if self._inputs is None else now.bind(self._inputs)

    def _write(self, batch: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        example = session.loaded(self._model).example
        with torch.no_grad():
            computed = example.call(self._model, [batch[name] for name in example.inputs])
        listed = [computed] if isinstance(computed, Tensor) else list(computed)
        gold = {name: to_torch(one).contiguous() for name, one in zip(outputs, listed, strict=True)}
        if self.gold_file_path is not None and ending.communicator().rank == 0:
            kept = {f"{_INPUT}{name}": tensor.contiguous() for name, tensor in batch.items()}
            kept |= {f"{_OUTPUT}{name}": tensor for name, tensor in gold.items()}
            write_tensors(self.gold_file_path, kept, "the gold outputs", "--gold-file-path FILE.safetensors")
        return gold


def _under(prefix: str, gold: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in gold.items() if name.startswith(prefix)}


def _made_up(program: Program) -> dict[str, Tensor]:
    """A batch for the inputs of a program, the same each time."""
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for name, symbol in inputs_of(program).items():
        # In bf16 first, so that a PEF of bf16 has the same inputs as the host.
        numbers = torch.randn(symbol.type.shape, generator=generator).bfloat16()
        dtype = getattr(torch, symbol.type.dtype)
        batch[name] = (numbers if dtype.is_floating_point else numbers.zero_()).to(dtype)
    return batch


def consistency_test(check: Check | None = None) -> Any:
    """Decorates `fn(args, model, inputs, outputs)`, which runs the session and returns a list of (name, tensor), with
    or without `()`: a call runs it twice from the same device state and random generator, and returns the list. Raises
    AssertionError for the first tensor whose bits differ; OptionError if no PEF is loaded, or for another result."""
    if check is None:
        return consistency_test

    def results(args: Any, kwargs: Any) -> Results:
        pairs: object = check(*args, **kwargs)
        if isinstance(pairs, list | tuple) and all(isinstance(one, tuple | list) and len(one) == 2 for one in pairs):
            return list(pairs)
        what = f"{getattr(check, '__name__', 'the function')} must return a list of (name, tensor) for consistency_test"
        raise app_error(OptionError, what, 'return [("loss", loss), ("outputs", outputs)]')

    @functools.wraps(check)
    def twice(*args: Any, **kwargs: Any) -> Results:
        if session.machine is None:
            remedy = "call samba.utils.trace_graph(model, inputs, optim, pef=args.pef) before it"
            raise app_error(OptionError, "consistency_test needs a loaded PEF", remedy)
        replica = session.machine.replica
        state = {name: replica.read(name) for name in session.machine.program.names_of(*DEVICE_STATE)}
        steps, begun, drawn = replica.steps, dict(replica.begun), torch.get_rng_state()
        first = [(name, to_torch(tensor).detach().clone()) for name, tensor in results(args, kwargs)]
        replica.meet()
        replica.forget()
        for name, value in state.items():
            replica.write(name, value)
        replica.begun.update(begun)
        replica.steps = steps
        replica.meet()
        torch.set_rng_state(drawn)
        second = results(args, kwargs)
        before, after = (", ".join(name for name, _ in pairs) for pairs in (first, second))
        if before != after:
            raise AssertionError(f"the second run gives {after}, and the first {before}")
        for (name, value), (_, again) in zip(first, second, strict=True):
            if value.shape != again.shape or bytes_of(value) != bytes_of(to_torch(again)):
                raise AssertionError(f"{name} differs between two runs from the same state")
        return second

    return twice


MAX_BF16_TRUNCATE_NORMAL_REL = 2.0**-7
"""The largest relative error of truncating a normal fp32 number to bf16, which has 8 significant bits."""


def write_json(path: str | os.PathLike[str], *rows: Mapping[str, JsonValue], appends: bool = False) -> None:
    """Writes each row as a line of JSON, with infinity and NaN as text, which JSON does not have; or `appends` it and
    makes the folder. Raises OptionError if that fails."""
    text = "".join(f"{to_json(row, inf_nan_mode='strings').decode()}\n" for row in rows)
    with failing_with(OptionError, f"{path} cannot be written", "give another path"):
        if appends:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a" if appends else "w", encoding="utf-8") as file:
            file.write(text)


@checks_keywords("assert_close")
def assert_close(
    samba: Any, gold: Any, label: str, threshold: float = 3e-3, rtol: float = 0.0, visualize: bool = False
) -> None:
    """Checks that every element of `samba` is within `threshold + rtol * |gold|` of the same element of `gold`. Both
    are tensors, arrays or numbers, compared in float64. NaN is not close to anything. If one is bf16, 1/256 is added to
    `rtol`. `visualize` has no effect. Raises AssertionError with the worst element, or with the shapes; DataError for
    what cannot be compared, such as an sn_grad that is None."""
    actual, expected = _float64(samba, label, "first"), _float64(gold, label, "second")
    rounded = any(isinstance(one, Tensor) and one.dtype is torch.bfloat16 for one in (samba, gold))
    rtol += 2.0**-8 * rounded  # the largest relative error of rounding to bf16
    if actual.shape != expected.shape:
        raise AssertionError(f"{label}: the shape is {tuple(actual.shape)}, and {tuple(expected.shape)} was expected")
    difference = (actual - expected).abs()
    apart = ~((actual == expected) | (difference <= threshold + rtol * expected.abs()))
    if not apart.any():
        return
    # NaN counts as infinitely far away, so that it is the worst element.
    distance = torch.where(apart, difference.nan_to_num(nan=torch.inf), -torch.inf)
    worst = np.unravel_index(int(distance.argmax()), tuple(actual.shape))
    hint = "; in bf16: are both inputs the same, as of samba.randn(…).bfloat16().float()?" if rounded else ""
    training = None if session.machine is None else session.machine.program.training
    if training is not None and rates_of(training):
        hint += '; the model has dropout, for which host and device draw different numbers: hyperparam_dict={"p": 0.0}'
    place = f" at {[int(index) for index in worst]}" if worst else ""
    raise AssertionError(
        f"{label}: {int(apart.sum())} of {apart.numel()} elements differ by more than "
        f"{threshold:g}{f' + {rtol:g} of the expected value' if rtol else ''}; the worst{place} is "
        f"{float(actual[worst]):g}, and {float(expected[worst]):g} was expected{hint}"
    )


def _float64(value: Any, label: str, place: str) -> Tensor:
    try:
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = "give two tensors, arrays or numbers"
        if value is None:
            remedy += "; a gradient is None before the first backward, where requires_grad is False (for sn_grad of an "
            remedy += "input, at the compile), and for grad of a computed tensor, such as a weight under weight_norm_"
        what = f"{label}: a {type(value).__name__} cannot be compared, the {place} value"
        raise app_error(DataError, what, remedy) from error
    return host_values(tensor).to(torch.float64)


class AccuracyReport:
    """Figures under names: `AccuracyReport(val_metrics={"acc": 97.5, "loss": 0.1}, batch_size=32)`. Each is an
    attribute: a number, a text, a tensor of one element, or a dictionary of these; OptionError for other values."""

    def __init__(self, **figures: object) -> None:
        self.figures: dict[str, JsonValue] = {name: _plain(name, value) for name, value in figures.items()}

    def __getattr__(self, name: str) -> object:
        figures: Mapping[str, object] = vars(self).get("figures", {})
        if name in figures:
            return figures[name]
        raise AttributeError(f"this report has no {name}; it has {', '.join(figures) or 'nothing'}")

    def save(self, path: str | os.PathLike[str] | None) -> None:
        """Writes the figures as one line of JSON; nothing for None, the default of --acc-report-json."""
        if path is not None:
            write_json(path, self.figures)


def _plain(name: str, value: object) -> JsonValue:
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}[{key!r}]", one) for key, one in value.items()}
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    what = f"a report holds numbers and texts, and {name} is {type(value).__name__}"
    raise OptionError(what, remedy="give one number, a tensor of one element, a text, or a dictionary of these")


def dump_accuracy_debug_info(
    args: Namespace | str | os.PathLike[str],
    model: nn.Module,
    inputs: object = None,
    traced_outputs: object = None,
    step: int = 0,
) -> Path:
    """Appends to this rank's file a line of JSON with figures for each tensor on the device, and for the inputs and
    outputs of the last run. Returns the path. args: the folder; or the arguments of the app, for the folder
    accuracy_debug in its --output-folder, or in out. Raises OptionError if the file cannot be written."""
    folder = Path(args.output_folder or "out", "accuracy_debug") if isinstance(args, Namespace) else Path(args)
    path = folder / f"accuracy_debug_info.rank{process.current().rank}.jsonl"
    rows = [{"step": step, **row} for row in _rows(model)]
    write_json(path, *rows, appends=True)
    return path


def _rows(model: nn.Module) -> Iterator[dict[str, JsonValue]]:
    program = session.loaded(model).machine.program
    host = {name: one.tensor for one in held_by(model) for name in one.names}
    symbols = [symbol for symbol in program.symbols.values() if symbol.kind in (SymbolKind.GRADIENT, *DEVICE_STATE)]
    for symbol, tensor in zip(symbols, session.get_tensors_by_name([one.name for one in symbols]), strict=True):
        device = tensor.sn_data.double()
        row: dict[str, JsonValue] = {"name": symbol.name, "kind": symbol.kind.value, **_figures(device)}
        if symbol.torch_names and symbol.torch_names[0] in host:
            apart = (device - host[symbol.torch_names[0]].detach().double()).abs()
            row["largest_difference_to_host"] = float(apart.max()) if apart.numel() else 0.0
        yield row
    for name, value in session.tensor_dict.items():
        if isinstance(value, SambaTensor) and value.has_data:
            yield {"name": name, "kind": program.symbols[name].kind.value, **_figures(to_torch(value).double())}


def _figures(values: Tensor) -> dict[str, JsonValue]:
    if not values.numel():
        return {"elements": 0}
    shown = {"norm": values.norm(), "mean": values.mean(), "least": values.min(), "largest": values.max()}
    numbers = {name: float(value) for name, value in shown.items()}
    return {"elements": values.numel(), **numbers, "not_finite": int((~values.isfinite()).sum())}
