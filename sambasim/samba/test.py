"""`TestWithGold`: what the device computes, against a file of what the host did.

The gold file holds the outputs of PyTorch for one batch, under the names that the PEF has for them. It is written the
first time, and compared with from then on: so a later version of the app, or of sambasim, is held to earlier results.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sambasim.errors import OptionError, WeightsError
from sambasim.ir.graph import SectionKind
from sambasim.runtime.weights import write_tensors
from sambasim.samba import context
from sambasim.samba.closeness import assert_close
from sambasim.samba.request import Inputs, flat
from sambasim.samba.session import outputs_of, session
from sambasim.samba.tensor import SambaTensor, to_torch

__all__ = ["TestWithGold"]


class TestWithGold:
    """A test of the loaded PEF: `TestWithGold(model, inputs, args.gold_file_path).run()`.

    gold_file_path: a .safetensors file; None for what `--gold-file-path` said, and if that was not given either, the
        outputs of the host are computed each time and kept nowhere
    threshold, rtol: as for `utils.assert_close`
    """

    __test__ = False  # pytest takes a class of this name for one of its own

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        gold_file_path: str | Path | None = None,
        threshold: float = 3e-3,
        rtol: float = 0.0,
    ) -> None:
        given = gold_file_path or getattr(context.current().arguments, "gold_file_path", None)
        self.gold_file_path = None if given is None else Path(given)
        self._model, self._inputs = model, inputs
        self._threshold, self._rtol = threshold, rtol

    def run(self) -> dict[str, Tensor]:
        """Compare the outputs of the device, by FWD alone, with gold ones; where there is no gold file yet, it is
        written from the outputs of the host. Returns the gold outputs by name.

        The weights of the host are brought from the device first, so that both compute with the same ones. Raises
        AssertionError as `utils.assert_close` does, WeightsError for a file that holds other outputs than the PEF's,
        and OptionError if no PEF is loaded for the model, or if the file cannot be written.
        """
        session.to_cpu(self._model)
        found = session.run(self._inputs, section_types=[SectionKind.FWD])
        device = {str(one.sn_name): one for one in ([found] if isinstance(found, SambaTensor) else found)}
        gold = self._gold([*device])
        for name, value in device.items():
            assert_close(value, gold[name], name, self._threshold, self._rtol)
        return gold

    def write_gold(self) -> dict[str, Tensor]:
        """Compute the outputs of the host, write them over the gold file, if there is to be one, and return them by
        name. Raises what `run` does."""
        session.to_cpu(self._model)
        return self._write([str(tensor.sn_name) for tensor in outputs_of(session.program(self._model))])

    def _gold(self, names: Sequence[str]) -> dict[str, Tensor]:
        if self.gold_file_path is None or not self.gold_file_path.exists():
            return self._write(names)
        try:
            gold = load_file(self.gold_file_path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{self.gold_file_path} is no safetensors file: {error}", remedy="delete it, and it is written anew"
            ) from error
        if gold.keys() != set(names):
            raise WeightsError(
                f"{self.gold_file_path} holds {', '.join(sorted(gold))}, and the PEF's outputs are {', '.join(names)}",
                remedy="give the gold file of this model; or delete it, and it is written anew",
            )
        return gold

    def _write(self, names: Sequence[str]) -> dict[str, Tensor]:
        gold = dict(zip(names, self._host_outputs(), strict=True))
        if self.gold_file_path is not None and context.communicator().rank == 0:
            write_tensors(self.gold_file_path, gold, "the gold outputs", "--gold-file-path FILE.safetensors")
        return gold

    def _host_outputs(self) -> list[Tensor]:
        tensors = [to_torch(tensor) for tensor in flat(self._inputs)]
        with torch.no_grad():
            if isinstance(self._inputs, Mapping):
                outputs = self._model(**dict(zip(self._inputs, tensors, strict=True)))
            else:
                outputs = self._model(*tensors)
        listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if not all(isinstance(one, Tensor) for one in listed):
            raise OptionError(
                f"{type(self._model).__name__} returns more than tensors",
                remedy="compare such outputs one by one, by utils.assert_close",
            )
        return [to_torch(one).contiguous() for one in listed]
