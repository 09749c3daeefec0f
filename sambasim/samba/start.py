"""The gradients of outputs from which a backward starts.

The app sets `output.sn_grad`, which holds until it is set again, or `grad_of_outputs=` for one run. Otherwise a
backward starts from the gradient of the mean of the loss, which is one number, or one for each sample. If the app
computes the loss itself, a backward can start from several outputs; those without a gradient get zeros.
"""

from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from sambasim.compiler.names import gradient_name
from sambasim.errors import DataError, OptionError
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.runtime.executor import Tangent
from sambasim.samba import context
from sambasim.samba.checks.findings import Finding, reporter
from sambasim.samba.checks.place import app_line
from sambasim.samba.tensor import to_torch


class Start:
    """The outputs of a program from which its backward starts."""

    def __init__(self, program: Program, outputs: Sequence[str], *, loss_is_chosen: bool) -> None:
        """outputs: the names of all outputs, in order
        loss_is_chosen: whether the app gave `loss_indices`
        """
        symbols = program.symbols
        tangents = {name for name, symbol in symbols.items() if symbol.kind is SymbolKind.TANGENT}
        self._outputs = outputs
        self._types = {name: symbols[name].type for name in outputs if gradient_name(name) in tangents}
        self._means = {name: _gradient_of_mean(type_) for name, type_ in self._types.items()}
        self.is_loss = loss_is_chosen or all(_may_be_loss(type_) for type_ in self._types.values())
        """Whether each output is a loss: one number, one for each sample, or one of `loss_indices`."""

    def tangent(
        self, given: Mapping[str, Tensor], for_this_run: Tensor | float | Sequence[Tensor | float | None] | None
    ) -> Tangent:
        """The gradients from which the backward starts; None for a program without a backward.

        given: the `sn_grad` of outputs, by name
        for_this_run: `grad_of_outputs`, one for each output in order, instead of `given`

        Reports once if it is the mean of an output that is no loss (AP09). Raises OptionError for a gradient of an
        output from which this PEF does not start; DataError for one of another shape than its output, and if several
        outputs might be the loss and none has a gradient.
        """
        gradients = given if for_this_run is None else self._by_name(for_this_run)
        if not gradients:
            if not self.is_loss and not str(context.current().command).startswith("measure"):
                self._report_no_loss()
            return self._started(self._means)
        shaped = {name: self._shaped(name, gradient) for name, gradient in gradients.items()}
        return self._started({name: shaped.get(name, torch.zeros_like(mean)) for name, mean in self._means.items()})

    def _started(self, gradients: Mapping[str, Tensor]) -> Tangent:
        if len(gradients) > 1:
            return {gradient_name(name): gradient for name, gradient in gradients.items()}
        return next(iter(gradients.values()), None)

    def _by_name(self, gradients: Tensor | float | Sequence[Tensor | float | None]) -> Mapping[str, Tensor]:
        listed = list(gradients) if isinstance(gradients, list | tuple) else [gradients]
        if len(listed) > len(self._outputs):
            raise OptionError(
                f"grad_of_outputs has {len(listed)} gradients for {len(self._outputs)} outputs",
                where=app_line(),
                remedy="give one for each output, and None for those that the backward does not start from",
            )
        pairs = zip(self._outputs, listed, strict=False)
        return {name: as_gradient(one) for name, one in pairs if one is not None}

    def _shaped(self, name: str, gradient: Tensor) -> Tensor:
        if name not in self._types:
            raise OptionError(
                f"sn_grad is set on {name}, and the backward of this PEF starts only from {', '.join(self._types)}",
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

    def _report_no_loss(self) -> None:
        first, *others = self._types or ("",)
        if others:
            raise DataError(
                f"AP09: the model returns no loss, and no gradient is set on its outputs: {first}, {', '.join(others)}",
                where=app_line(),
                remedy="set sn_grad on an output before the backward, or give session.run grad_of_outputs=[…]; or "
                "return the loss first, as one number; or give loss_indices=[0] to session.compile",
            )
        what = f"the backward starts from the mean of {first}, of shape {self._types[first].shape}: it is no loss"
        reporter.report(Finding("AP09", what, app_line(), "return a loss, or set output.sn_grad before the backward"))


def as_gradient(value: object) -> Tensor:
    """A gradient from an app as a plain tensor. Raises DataError for anything but a tensor or a number."""
    if isinstance(value, Real):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise DataError(
            f"a gradient must be a tensor or a number, not {type(value).__name__}",
            where=app_line(),
            remedy="give a tensor of the output's shape",
        )
    return to_torch(value).detach()


def _gradient_of_mean(type_: TensorType) -> Tensor:
    return torch.full(type_.shape, 1 / type_.numel, dtype=getattr(torch, type_.dtype))


def _may_be_loss(type_: TensorType) -> bool:
    """One number, or one for each sample."""
    return len(type_.shape) <= 1 or type_.numel == 1
