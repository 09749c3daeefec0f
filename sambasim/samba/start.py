"""Where a backward starts: from which outputs, and from which gradients.

The app sets the gradient of an output by `output.sn_grad` or `grad_of_outputs=`. Where it sets none, a backward starts
from the gradient of the mean of the loss, which is one number, or one for each sample. A model that computes its loss
outside may have several outputs from which a backward can start; those whose gradient is not set get zeros.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sambasim.compiler.names import gradient_name
from sambasim.errors import DataError, OptionError
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.runtime.executor import Tangent
from sambasim.samba import context
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling
from sambasim.samba.tensor import SambaTensor, to_torch


class Start:
    """The outputs of one program from which its backward starts."""

    def __init__(self, program: Program, *, loss_is_chosen: bool) -> None:
        """loss_is_chosen: whether the app said, by `loss_indices`, which outputs are losses"""
        symbols = program.symbols
        outputs = [name for name, symbol in symbols.items() if symbol.kind is SymbolKind.OUTPUT]
        tangents = {name for name, symbol in symbols.items() if symbol.kind is SymbolKind.TANGENT}
        self._types: Mapping[str, TensorType] = {
            name: symbols[name].type for name in outputs if gradient_name(name) in tangents
        }
        self._means = {name: _gradient_of_mean(type_) for name, type_ in self._types.items()}
        self._is_loss = loss_is_chosen or all(_may_be_loss(type_) for type_ in self._types.values())

    def tangent(self, outputs: Iterable[SambaTensor]) -> Tangent:
        """What the backward starts from, with the `sn_grad` of `outputs`; None for a program without a backward.

        Tells once if a mean of something that is no loss is differentiated (AP09). Raises OptionError for an `sn_grad`
        on an output from which this PEF does not start, and DataError for one of another shape than its output, and
        where several outputs might be the loss and none has a gradient.
        """
        given: dict[str, Tensor] = {}
        for output in outputs:
            if output.sn_grad is not None and output.sn_name not in given:
                given[str(output.sn_name)] = self._shaped(str(output.sn_name), output.sn_grad)
        if not given and not self._is_loss and context.current().trains:
            self._tell_of_no_loss()
        rest = (lambda mean: mean) if self._is_loss or not given else torch.zeros_like
        tangents = {name: given[name] if name in given else rest(mean) for name, mean in self._means.items()}
        if len(tangents) > 1:
            return {gradient_name(name): tangent for name, tangent in tangents.items()}
        return next(iter(tangents.values()), None)

    def _shaped(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self._types:
            raise OptionError(
                f"sn_grad is set on {name}, and the backward of this PEF starts from {', '.join(self._types)} alone",
                where=app_line(),
                remedy=f"set sn_grad on {next(iter(self._types), 'the loss')}; or compile with loss_indices=[…]",
            )
        type_ = self._types[name]
        if gradient.numel() not in (1, type_.numel):
            raise DataError(
                f"sn_grad of {name} has the shape {tuple(gradient.shape)}, and the output {type_.shape}",
                where=app_line(),
                remedy="set one number, or one for each element of the output",
            )
        plain = gradient.to(getattr(torch, type_.dtype))
        shaped = plain.reshape(()).expand(type_.shape) if gradient.numel() == 1 else plain.reshape(type_.shape)
        return shaped.contiguous()

    def _tell_of_no_loss(self) -> None:
        first, *others = self._types
        if others:
            raise DataError(
                f"the model returns no loss, and no gradient is set on its outputs: {first}, {', '.join(others)}",
                where=app_line(),
                remedy="set sn_grad on an output before the backward, or give session.run grad_of_outputs=[…]; or "
                "return the loss first, as one number; or give loss_indices=[0] to session.compile and trace_graph",
            )
        what = f"the backward starts from the mean of {first}, of shape {self._types[first].shape}: it is no loss"
        telling.tell(Finding("AP09", what, app_line(), "return a loss, or set output.sn_grad before the backward"))


def set_gradients(outputs: Sequence[SambaTensor], gradients: Tensor | Sequence[Tensor | None]) -> None:
    """`grad_of_outputs`: the `sn_grad` of each output, in order; None leaves one as it is."""
    listed = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    if len(listed) > len(outputs):
        raise OptionError(
            f"grad_of_outputs has {len(listed)} gradients, and there are {len(outputs)} outputs",
            where=app_line(),
            remedy="give one for each output, and None for those that the backward does not start from",
        )
    for output, gradient in zip(outputs, listed, strict=False):
        if gradient is not None:
            output.sn_grad = to_torch(gradient)


def _gradient_of_mean(type_: TensorType) -> Tensor:
    return torch.full(type_.shape, 1 / type_.numel, dtype=getattr(torch, type_.dtype))


def _may_be_loss(type_: TensorType) -> bool:
    """One number, or one for each sample."""
    return len(type_.shape) <= 1 or type_.numel == 1
