"""Do the model, the samples and the loss go together? Asked of the objects themselves, before anything is traced."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sambasim.compiler.step import TARGET, forward_line
from sambasim.compiler.watch import COMPLEX, HOOK
from sambasim.errors import DataError, ModelError
from sambasim.ir.types import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class _Trouble:
    what: str
    remedy: str


def check_tensors(model: nn.Module, *, training: bool) -> None:
    """Raises ModelError, once, naming every module and tensor of `model` that a PEF cannot hold, or not train."""
    troubles = [*_of_tensors(model), *(_of_training(model) if training else ())]
    if len(troubles) == 1:
        raise ModelError(troubles[0].what, remedy=troubles[0].remedy)
    if troubles:
        lines = "\n    ".join(trouble.what for trouble in troubles)
        remedies = "\n         ".join(dict.fromkeys(trouble.remedy for trouble in troubles))
        raise ModelError(f"the model has {len(troubles)} things that a PEF cannot hold:\n    {lines}", remedy=remedies)


def _of_tensors(model: nn.Module) -> Iterator[_Trouble]:
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            if is_lazy(tensor):
                remedy = "give its module the sizes: nn.Linear(…) instead of nn.LazyLinear(…)"
                yield _Trouble(f"the {kind} {name} has no shape yet: its module is lazy", remedy)
            elif tensor.device.type != "cpu":
                yield _Trouble(f"the {kind} {name} is on the device {tensor.device}", "build the model on the CPU")
            elif tensor.layout is not torch.strided:
                yield _Trouble(f"the {kind} {name} is a sparse tensor", "make it dense: .to_dense()")
            elif dtype not in DTYPE_BYTES:
                remedy = COMPLEX.rewrite if tensor.is_complex() else f"use one of {', '.join(DTYPE_BYTES)}"
                yield _Trouble(f"the {kind} {name} is {dtype}, which a PEF cannot hold", remedy)


def _of_training(model: nn.Module) -> Iterator[_Trouble]:
    parameters = list(model.parameters())
    if not parameters:
        yield _Trouble("the model has no parameters to train", "compile it with --inference")
    elif not any(parameter.requires_grad for parameter in parameters):
        remedy = "set requires_grad on those to train, or compile with --inference"
        yield _Trouble("all parameters of the model are frozen: requires_grad is False", remedy)
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield _Trouble(f"the parameter {name} has a gradient hook, which a graph does not call", HOOK.rewrite)
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            remedy = "compile the model inside of it with --data-parallel: the PEF's own sections sync its gradients"
            yield _Trouble(f"the {f'module {name}' if name else 'model'} is wrapped in {type(module).__name__}", remedy)
        if vars(module).get("_backward_hooks") or vars(module).get("_backward_pre_hooks"):
            named = f"module {name}" if name else "model"
            yield _Trouble(f"the {named} has a backward hook, which a graph does not call", HOOK.rewrite)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            kind = type(module).__name__
            what = f"the module {name} is {kind}(sparse=True), whose gradient is sparse; a PEF holds dense ones"
            yield _Trouble(what, f"leave out sparse=True: nn.{kind}({module.num_embeddings}, {module.embedding_dim})")


def check_inputs(model: nn.Module, inputs: dict[str, Tensor], loss: str | None, *, by_keyword: bool) -> None:
    """Raises DataError unless `model.forward` takes what a sample gives: `inputs`, of which the last one is the target
    where the config names a `loss`."""
    given = list(inputs)
    if loss is not None and (given[-1] != TARGET or len(given) == 1):
        only = f"{_list(given)} by name" if by_keyword else "one value"
        wanted = f'{{"x": x, "{TARGET}": label}}' if by_keyword else "(x, label)"
        raise DataError(
            f"the loss {loss} needs a target, and a sample gives {only}",
            remedy=f"give {wanted} in the dataset, or name no loss for a model that returns its own",
        )
    called = given[:-1] if loss is not None else given
    parameters = _parameters(model)
    if parameters is None:
        return
    missing = [p.name for p in parameters[0 if by_keyword else len(called) :] if p.default is p.empty]
    missing = [name for name in missing if name not in called]
    names = [parameter.name for parameter in parameters]
    extra = [name for name in called if name not in names] if by_keyword else called[len(names) :]
    if not missing and not extra:
        return
    if missing:
        trouble, gives = f"needs {_list(missing)}", _list(called)
    elif by_keyword:
        trouble, gives = f"does not take {_list(extra)}", _list(called)
    else:
        trouble, gives = f"takes {_count(names)}", _count(called)
    target = " and the target of the loss" if loss is not None else ""
    raise DataError(
        f"forward({_list(names)}) {trouble}, and a sample gives {gives}{target}",
        where=forward_line(model),
        remedy=_remedy(missing, loss),
    )


def _parameters(model: nn.Module) -> Sequence[inspect.Parameter] | None:
    """The parameters of `forward`; None where it takes whatever comes."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return None
    return parameters


def _remedy(missing: Sequence[str], loss: str | None) -> str:
    if missing:
        return "give it in every sample, or give it a default in forward()"
    if loss is None:
        return "name the loss that takes the last value as its target: --set loss.name=cross_entropy"
    return "leave it out of the samples, or take it in forward()"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} input{'' if len(names) == 1 else 's'}"
