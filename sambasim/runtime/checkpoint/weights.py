"""The weights that a run starts from, or predicts with, if they are not those of the PEF: of a file, of a checkpoint,
or of a caller in Python."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace

import torch

from sambasim.errors import WeightsError
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.run import RunOptions
from sambasim.runtime.checkpoint.choose import choose
from sambasim.runtime.checkpoint.content import Checkpoint, buffer_name
from sambasim.runtime.machine.agreement import check_equal
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.values.memory import Tensors, fitting, read_saved, tensor_sha256
from sambasim.units import first_of

_FORMS = "a file of --save, of torch.save(model.state_dict(), FILE), or the folder of a checkpoint"


def given_weights(
    options: RunOptions, program: Program, communicator: Communicator, live: Mapping[str, object] | None
) -> tuple[Tensors, list[str]]:
    """Collective. What takes the place of weights of the PEF, by symbol, and notices: `live`, by the names of a
    state_dict, or what `options` name. Raises WeightsError if unfit, CheckpointError, and PeerError for other `live`
    weights than rank 0 has."""
    path = options.weights
    if live is None and path is None:
        return {}, []
    if options.checkpoint.resume is not None:
        return {}, ["--weights has no effect: the weights are those of the checkpoint"]
    if path is None:
        source, named = "the given weights", _tensors_in(live, "the given weights")
        texts = (f"{name} {tensor_sha256(tensor)}" for name, tensor in sorted(named.items()))
        if communicator.world_size > 1:
            check_equal(communicator, {"weights": hashlib.sha256("".join(texts).encode()).hexdigest()[:12]})
    elif path.is_dir():
        checkpoint, _ = choose(str(path), None, communicator)
        source, named = f"the weights in {checkpoint.path}", _of_checkpoint(checkpoint, program)
    elif not path.is_file():
        raise WeightsError(f"the weights file {path} is not there", remedy="--weights FILE.safetensors, made by --save")
    else:
        saved = read_saved(path, f"--weights takes {_FORMS}")
        source, named = f"the weights in {path}", _tensors_in(saved, str(path))
    return fitting(named, program, source, strict=options.strict)


def _tensors_in(value: object, source: str) -> Tensors:
    """The tensors of a state_dict, or of the only one among the entries of what a script has saved."""
    entries: Mapping[object, object] = value if isinstance(value, Mapping) else {}
    tables = [one for one in (entries, *entries.values()) if isinstance(one, Mapping)]
    held = [
        {str(name): one.detach() for name, one in table.items() if isinstance(one, torch.Tensor)} for table in tables
    ]
    found = [table for table in held if table]
    if not held[0] and len(found) != 1:
        names = first_of([*map(str, entries)]) or type(value).__name__
        what = f"{source} hold {'several' if found else 'no'} tables of tensors: {names}"
        raise WeightsError(what, remedy="give the state_dict of the model alone")
    return found[0]


def _of_checkpoint(checkpoint: Checkpoint, program: Program) -> Tensors:
    """Its parameters, and the buffers of replica 0, by the names of the model's state_dict."""
    named = dict[str, torch.Tensor]()
    for name, saved in checkpoint.manifest.tensors.items():
        if saved.kind is not SymbolKind.OPTIMIZER_STATE:
            whole = torch.empty(saved.whole.shape, dtype=getattr(torch, saved.type.dtype))
            prefix = buffer_name(0, 0, "") if saved.kind is SymbolKind.BUFFER else ""
            checkpoint.read_part(replace(saved, type=saved.whole, cuts=()), {}, 0, whole.view(-1), prefix)
            named |= dict.fromkeys(program.symbols.get(name, saved).torch_names[:1], whole)
    return named
