"""`trace_graph`: load a PEF for the model that it was compiled from, and make sure that it still is that model."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from sambasim.errors import PefError
from sambasim.ir.program import Program
from sambasim.pef import PefDocument, locate, read
from sambasim.runtime.capacity import check_device
from sambasim.runtime.determinism import make_repeatable
from sambasim.runtime.engine.allocation import keep_freed_memory
from sambasim.runtime.stepwise import StepwiseReplica
from sambasim.runtime.threads import default_threads
from sambasim.samba import context
from sambasim.samba.difference import first_difference
from sambasim.samba.machine import Machine
from sambasim.samba.request import Inputs, Optimizer, as_sequence, build_fields_of, request
from sambasim.samba.session import outputs_of, session
from sambasim.samba.tensor import SambaTensor


def trace_graph(
    model: nn.Module,
    inputs: Inputs,
    optim: Optimizer | Sequence[Optimizer] | None = None,
    init_output_grads: bool = True,
    loss_indices: Sequence[int] | None = None,
    pef: str = "",
    mapping: str = "section",
    data_parallel_mode: str = "normal",
    transfer_device: bool = True,
    distlearn_config: object = None,
    dev_mode: bool = False,
    config_dict: object = None,
) -> tuple[SambaTensor, ...] | SambaTensor:
    """Read `pef`, trace `model` again, and load it into the session. Returns the outputs, still without data, which are
    `model.output_tensors` too: a tuple, or one tensor for one output.

    inputs: one batch, as it was given to `session.compile`
    optim: the optimizers that were compiled, or None for an inference PEF
    transfer_device: whether the weights of the model, and the state of its optimizers, go to the device now

    The backward starts from the gradient of the mean of the first output, unless the app sets its `sn_grad`. The rest
    of the arguments is taken as apps give it, and changes nothing.
    Raises PefError if the PEF was compiled from another graph, with the first difference.
    """
    document = read(locate(pef))
    check_device(document)
    communicator = context.communicator()
    keep_freed_memory()
    make_repeatable(getattr(context.current().arguments, "threads", None) or default_threads(communicator, 1))
    optimizers = as_sequence(optim)
    _compare(document, _trace(model, inputs, optimizers, document))
    machine = Machine(document, model, optimizers, StepwiseReplica(document.program, communicator))
    outputs = tuple(outputs_of(document.program))
    session.load(machine, outputs)
    if transfer_device:
        machine.to_device()
    model.output_tensors = outputs  # type: ignore[assignment]  # apps read it there
    return outputs[0] if len(outputs) == 1 else outputs


def _trace(model: nn.Module, inputs: Inputs, optimizers: Sequence[Optimizer], document: PefDocument) -> Program:
    """The program that the model makes now, compiled as the PEF was."""
    # They take seconds to import, and importing samba must not.
    from sambasim.compiler.compile import Stopwatch, capture_model, pipeline
    from sambasim.compiler.passes import run_pipeline

    fields = {**build_fields_of(document.compile_options), "output_folder": Path("out")}
    asked = request(model, inputs, optimizers, fields, inference=document.program.training is None)
    built = capture_model(
        model,
        asked.inputs,
        asked.options,
        by_keyword=asked.by_keyword,
        watch=Stopwatch(lambda phase: None),
        any_loss=True,
    )
    return run_pipeline(built.program, pipeline(asked.options, asked.updates or None), lambda title: None)


def _compare(document: PefDocument, traced: Program) -> None:
    difference = first_difference(document.program, traced)
    if difference is not None:
        raise PefError(
            f"the PEF {document.program.name} was compiled from another graph: {difference}",
            remedy="compile the app again, and run it with the same model, batch size and optimizers",
        )
