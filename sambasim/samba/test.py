"""Tests of an app's device results: `TestWithGold` and `consistency_test`.

A gold file has one batch and PyTorch's results. The first test writes it, and later ones compare with it, also after
changes of the app or of sambasim.
"""

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sambasim.compiler.step import forward_parameters
from sambasim.errors import OptionError, WeightsError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef import locate, read
from sambasim.pef.weights import bytes_of
from sambasim.runtime.weights import write_tensors
from sambasim.samba import context
from sambasim.samba.checks.place import app_line
from sambasim.samba.inputs import Inputs, inputs_of, name_inputs
from sambasim.samba.request import Optimizer
from sambasim.samba.session import session
from sambasim.samba.tensor import SambaTensor, to_torch
from sambasim.samba.trace import trace_graph
from sambasim.samba.utils.accuracy import assert_close

__all__ = ["TestWithGold", "consistency_test"]

Results: TypeAlias = Sequence[tuple[str, Tensor]]
Check: TypeAlias = Callable[..., Results]

_INPUT, _OUTPUT = "input.", "output."
_DEVICE_STATE = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE)


class TestWithGold:
    """A test of a PEF: `TestWithGold(args, "logreg", model, None, optimizer).test()`.

    args: with `gold_file_path`, a .safetensors file; None to compute on the host each time
    name: the prefix of outputs in messages
    inputs: one batch; None for that of `trace_graph`, or, if no PEF is loaded, for seeded normal numbers, and zeros for
        whole numbers, with the PEF of `args.pef`. A gold file that exists has its own batch.
    optimizer: what the PEF was compiled with; None for an inference PEF
    threshold, rtol: as for `utils.assert_close`
    """

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
        self._args, self._name, self._model, self._inputs, self._optimizer = args, name, model, inputs, optimizer
        self._threshold, self._rtol = threshold, rtol

    def test(self) -> dict[str, Tensor]:
        """Compares the outputs of FWD on the device with the gold file; writes it from the host's outputs if there is
        none. Returns the gold outputs by name.

        Copies the weights from the device to the host first. Raises AssertionError as `utils.assert_close` does,
        WeightsError for a file with other outputs than the PEF's, OptionError if the file cannot be written, and what
        `trace_graph` raises.
        """
        batch = self._batch()
        gold = None
        if self.gold_file_path is not None and self.gold_file_path.exists():
            gold = _read(self.gold_file_path)
            batch = _under(_INPUT, gold)
        session.to_cpu(self._model)
        named = [SambaTensor(tensor, name=name, batch_dim=0) for name, tensor in batch.items()]
        found = session.run(named, section_types=[SectionKind.FWD])
        device = {str(one.sn_name): one for one in ([found] if isinstance(found, SambaTensor) else found)}
        expected = self._write(batch, [*device]) if gold is None else _under(_OUTPUT, gold)
        if expected.keys() != device.keys():
            raise WeightsError(
                f"{self.gold_file_path} holds {', '.join(expected)}, and the PEF's outputs are {', '.join(device)}",
                remedy="give the gold file of this model, or delete it to write a new one",
            )
        for name, value in device.items():
            assert_close(value, expected[name], f"{self._name}: {name}", self._threshold, self._rtol)
        return expected

    def _batch(self) -> Mapping[str, Tensor]:
        """One batch, by the names of the PEF's inputs; the PEF is loaded when this returns."""
        given = None if self._inputs is None else name_inputs(self._model, self._inputs)[0]
        try:
            program = session.program(self._model)
        except OptionError:
            program = read(locate(self._args.pef)).program
            given = _made_up(program) if given is None else given
            named = [SambaTensor(tensor, name=name, batch_dim=0) for name, tensor in given.items()]
            inputs = self._inputs if isinstance(self._inputs, Mapping) else named
            trace_graph(self._model, inputs, self._optimizer, pef=self._args.pef)
        batch = session.example_inputs if given is None else given
        return {name: to_torch(tensor) for name, tensor in (batch or _made_up(program)).items()}

    def _write(self, batch: Mapping[str, Tensor], outputs: Sequence[str]) -> dict[str, Tensor]:
        gold = dict(zip(outputs, self._host_outputs(batch), strict=True))
        if self.gold_file_path is not None and context.communicator().rank == 0:
            kept = {f"{_INPUT}{name}": tensor.contiguous() for name, tensor in batch.items()}
            kept |= {f"{_OUTPUT}{name}": tensor for name, tensor in gold.items()}
            write_tensors(self.gold_file_path, kept, "the gold outputs", "--gold-file-path FILE.safetensors")
        return gold

    def _host_outputs(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        by_name = batch.keys() <= set(forward_parameters(self._model))
        with torch.no_grad():
            outputs = self._model(**batch) if by_name else self._model(*batch.values())
        listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if not all(isinstance(one, Tensor) for one in listed):
            raise OptionError(
                f"{type(self._model).__name__} returns more than tensors",
                remedy="compare such outputs one by one, by utils.assert_close",
            )
        return [to_torch(one).contiguous() for one in listed]


def _under(prefix: str, gold: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in gold.items() if name.startswith(prefix)}


def _read(path: Path) -> Mapping[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} is no safetensors file: {error}", remedy="delete it to write a new one") from error


def _made_up(program: Program) -> dict[str, Tensor]:
    """A batch for the inputs of a program, the same each time."""
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for name, symbol in inputs_of(program).items():
        dtype = getattr(torch, symbol.type.dtype)
        # In bf16 first, so that a PEF of bf16 has the same inputs as the host.
        numbers = torch.randn(symbol.type.shape, generator=generator).bfloat16()
        batch[name] = numbers.to(dtype) if dtype.is_floating_point else torch.zeros(symbol.type.shape, dtype=dtype)
    return batch


@overload
def consistency_test(check: Check) -> Check: ...


@overload
def consistency_test(check: None = None) -> Callable[[Check], Check]: ...


def consistency_test(check: Check | None = None) -> Check | Callable[[Check], Check]:
    """Decorates `fn(args, model, inputs, outputs)`, which runs the session and returns a list of (name, tensor): a call
    runs it twice from the same state, and returns the list.

    The state is the parameters, buffers and optimizer states, the count of steps, and torch's random generator.
    Raises AssertionError, with the name, for the first tensor whose bits differ; OptionError if the function returns
    something else or no PEF is loaded. Used as `@consistency_test()` and as `@consistency_test`.
    """
    if check is None:
        return consistency_test
    tested = check

    @functools.wraps(check)
    def twice(*args: Any, **kwargs: Any) -> Results:
        if session.machine is None:
            raise OptionError(
                "consistency_test needs a loaded PEF",
                where=app_line(),
                remedy="call samba.utils.trace_graph(model, inputs, optim, pef=args.pef) before it",
            )
        replica, symbols = session.machine.replica, session.machine.program.symbols.values()
        state = {one.name: replica.read(one.name) for one in symbols if one.kind in _DEVICE_STATE}
        steps, drawn = replica.steps, torch.get_rng_state()
        first = [(name, to_torch(tensor).detach().clone()) for name, tensor in _results(tested, args, kwargs)]
        replica.meet()
        replica.forget()
        for name, value in state.items():
            replica.write(name, value)
        replica.steps = steps
        replica.meet()
        torch.set_rng_state(drawn)
        second = _results(tested, args, kwargs)
        names = [name for name, _ in second]
        if names != [name for name, _ in first]:
            raise AssertionError(f"the second run gives {', '.join(names)}, and the first {', '.join(dict(first))}")
        for (name, before), (_, after) in zip(first, second, strict=True):
            if before.shape != after.shape or bytes_of(before) != bytes_of(to_torch(after)):
                raise AssertionError(f"{name} differs between two runs from the same state")
        return second

    return twice


def _results(check: Check, args: Any, kwargs: Any) -> Results:
    results: object = check(*args, **kwargs)
    pairs = list(results) if isinstance(results, list | tuple) else None
    if pairs is None or not all(isinstance(one, tuple | list) and len(one) == 2 for one in pairs):
        raise OptionError(
            f"{getattr(check, '__name__', 'the function')} must return a list of (name, tensor) for consistency_test",
            where=app_line(),
            remedy='return [("loss", loss), ("outputs", outputs)]',
        )
    return pairs
