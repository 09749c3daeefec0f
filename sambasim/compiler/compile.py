"""Model, example batch, loss, optimizer and options in; one PEF out."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sambasim import __version__
from sambasim.compiler.build import Built, Captures, build
from sambasim.compiler.capture import (
    TESTED_TORCH,
    CapturedGraph,
    capture_by_running,
    capture_evaluation,
    capture_training,
    starts_a_backward,
)
from sambasim.compiler.effects import refuse_lost_effects
from sambasim.compiler.explain import explained
from sambasim.compiler.identity import digests_of_model
from sambasim.compiler.names import source_files
from sambasim.compiler.passes import Fits, Partition, Pass, Place, run_pipeline
from sambasim.compiler.pipeline.pipeline_parallel import PipelineParallel
from sambasim.compiler.precision import STORED, inputs_in, stored_in
from sambasim.compiler.recompute import Recompute
from sambasim.compiler.sharding.named_plan import general, tp_plan_of
from sambasim.compiler.sharding.tensor_parallel import TensorParallel
from sambasim.compiler.step import (
    EvaluationStep,
    TrainingStep,
    check_loss,
    loss_in,
    per_sample_loss,
    run_eagerly,
    training_loss,
)
from sambasim.compiler.tensors import check_model, made_contiguous
from sambasim.compiler.trial import buffers_of_plain_tensors, rare_collections, variables_are_tensors
from sambasim.compiler.update import AddDataParallel, AttachOptimizers, Update
from sambasim.errors import CaptureError, OptionError
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import load_device
from sambasim.ir.dataflow import gathers
from sambasim.ir.mesh import TENSOR
from sambasim.ir.program import Program
from sambasim.ir.schedule import Schedule, make, read_csv
from sambasim.options.compile import BUILD_FIELDS, CompileOptions
from sambasim.pef import PefDocument, write
from sambasim.pef.lookup import record_compiled
from sambasim.pef.sources import SOURCES, record
from sambasim.units import counted, format_bytes

_CHECKPOINTING = (
    "torch.utils.checkpoint in the model saves no memory here, and --recompute full does; buffers that it would change "
    "twice a step, such as BatchNorm statistics, change once"
)

_GRU_EXACT_MULTIPLE = 32
"""Hidden sizes of a GRU that are multiples of this give the bits of eager PyTorch: see docs/concepts.md."""


@dataclass(frozen=True, slots=True)
class Compiled:
    path: Path
    program: Program
    digest: str
    notices: tuple[str, ...]
    phases_s: Mapping[str, float]


class Stopwatch:
    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self._on_phase = on_phase
        self._phase: str | None = None
        self._began_s = 0.0
        self.phases_s: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        self.end()
        self._phase, self._began_s = phase, time.perf_counter()
        self._on_phase(phase)

    def end(self) -> None:
        if self._phase is not None:
            elapsed_s = time.perf_counter() - self._began_s
            self.phases_s[self._phase] = self.phases_s.get(self._phase, 0.0) + elapsed_s
        self._phase = None


def compile_model(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    options: CompileOptions,
    *,
    by_keyword: bool,
    updates: Sequence[Update] | None = None,
    any_loss: bool = False,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> Compiled:
    """Compile `model` for the batch `inputs` (by name, batch first) and write `OUTPUT/NAME/NAME.pef`. `updates`
    replaces the optimizer of `options`; with `any_loss` the loss may have any shape. A model in evaluation mode is
    captured after `model.train()`; the model is left as it was. Raises ModelError and CaptureError."""
    watch = Stopwatch(on_phase)
    built = capture_model(model, inputs, options, by_keyword=by_keyword, any_loss=any_loss, watch=watch)
    return assemble(built, model, options, watch, updates)


def capture_model(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    options: CompileOptions,
    *,
    by_keyword: bool,
    watch: Stopwatch,
    any_loss: bool = False,
    loss_indices: tuple[int, ...] = (),
) -> Built:
    """The graphs of `model`, without optimizer and data parallelism. With `any_loss`, the loss may be any output, those
    at `loss_indices` if there are any."""
    modes = [(module, module.training) for module in model.modules()]
    dtype = STORED[options.dtype]
    inputs = inputs_in(dtype, inputs)
    try:
        with buffers_of_plain_tensors(model):
            check_model(model, training=not options.inference, replicas=options.data_parallel or options.chips > 1)
            with rare_collections(), stored_in(dtype, model), made_contiguous(model), variables_are_tensors():
                loss = None if options.inference else options.loss
                mean = training_loss(loss.name, loss.args) if loss else None
                step = TrainingStep(model, tuple(inputs), mean, by_keyword, any_loss, loss_indices)
                captures = _capture(step, tuple(inputs.values()), options, watch)
                watch.begin("translate to the graph")
                return build(options.name, model, inputs, captures, next(iter(inputs.values())).shape[0])
    finally:
        for module, was_training in modes:
            module.training = was_training


def assemble(
    built: Built,
    model: nn.Module,
    options: CompileOptions,
    watch: Stopwatch,
    updates: Sequence[Update] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Compiled:
    """Run the passes that `options` ask for on what was captured, and write the PEF, with `metadata`."""
    notices: list[str] = []
    program = run_pipeline(built.program, pipeline(options, updates, model, notices.append), watch.begin)
    watch.begin("write the PEF")
    facts = {**(metadata or {}), **digests_of_model(built.program, built.weights)}
    facts[SOURCES] = record(program, source_files(model), options.model.target or "")
    written = write(options.pef_path, _document(program, model, options, facts), built.weights)
    watch.end()
    notices += _notices(program, model)
    if built.checkpointed:
        notices.append(_CHECKPOINTING)
    if built.cast_twice:
        notices.append(
            f"read several times under torch.autocast: {', '.join(built.cast_twice)}; PyTorch adds up their gradients "
            "in the narrow type, so results may differ from PyTorch's in the last bits of that type"
        )
    if why := record_compiled(written.digest):
        notices.append(f"cannot record that this account compiled the PEF ({why}): `sambasim run` will ask for --trust")
    return Compiled(options.pef_path, program, written.digest, tuple(notices), watch.phases_s)


def pipeline(
    options: CompileOptions,
    updates: Sequence[Update] | None = None,
    model: nn.Module | None = None,
    tell: Callable[[str], None] = lambda notice: None,
) -> Sequence[Pass]:
    """The passes that `options` ask for. `model` may have a plan for tensor parallelism; `tell` gets notices."""
    budget = budget_of(load_device(options.arch), load_calibration(), options.num_tiles)
    passes: list[Pass] = [Partition(options.opt_level, budget)]
    if options.recompute != "none" and not options.inference:
        sections = [Partition(options.opt_level, budget)] if options.recompute == "sections" else []
        passes = [*sections, Recompute(options.recompute), *passes]
    if updates is None and options.optimizer is not None:
        updates = [Update(options.optimizer.name, options.optimizer.hyperparameters())]
    optimizers = None
    if updates and not options.inference:
        optimizers = AttachOptimizers(
            tuple(updates),
            options.stochastic_rounding,
            options.gradient_groups,
            scales_loss=options.dtype == "fp16",
            master_weights=options.keeps_master_weights,
        )
    if (schedule := schedule_of(options)) is not None:
        of_tied = optimizers if options.zero < _SLICED_GRADIENTS else None  # slices need no balance
        shards = options.world_size * options.chips if options.zero else 1
        passes.insert(0, PipelineParallel(schedule, budget, of_tied, shards))
    if options.tensor_parallel == "weight":
        of_model = {} if model is None else tp_plan_of(model)
        passes.insert(0, TensorParallel(options.n_chips, options.tensor_plan or {}, of_model, tell))
    if optimizers is not None:
        passes.append(optimizers)
    if options.data_parallel or options.chips > 1:
        passes.append(AddDataParallel(options.world_size, options.chips, options.zero, several=options.data_parallel))
    return [*passes, Place(), Fits(budget)]


_SLICED_GRADIENTS = 2
"""The level of ZeRO from which replicas keep gradients in slices."""


def schedule_of(options: CompileOptions) -> Schedule | None:
    """None without a pipeline. Raises OptionError for a schedule that cannot be."""
    ranks, micro_batches = options.pipeline_stages, options.micro_batches
    if ranks == 1:
        return None
    if not options.schedule.endswith(".csv"):
        return make(options.schedule, ranks, micro_batches)
    found = read_csv(Path(options.schedule))
    if (found.ranks, found.micro_batches) != (ranks, micro_batches):
        fitting = f"--pipeline-stages {found.ranks} --micro-batches {found.micro_batches}"
        raise OptionError(
            f"{options.schedule} has {counted(found.ranks, 'rank')} and {found.micro_batches} micro-batches, not "
            f"{ranks} and {micro_batches}",
            remedy=fitting if found.ranks > 1 else f"write a row for each of the {ranks} ranks",
        )
    return found


def _capture(step: TrainingStep, tensors: tuple[Tensor, ...], options: CompileOptions, watch: Stopwatch) -> Captures:
    narrow = STORED[options.dtype]
    loss = None if options.inference else options.loss
    training = None
    if not options.inference:
        watch.begin("capture the training step")
        if not step.model.training:
            step.model.train()
        training = _captured(step, tensors, narrow, loss.name if loss else None)
    watch.begin("capture the evaluation graph")
    by_sample = per_sample_loss(loss.name, loss.args) if loss else None
    mean = training_loss(loss.name, loss.args) if loss and by_sample is None else None
    evaluation_step = EvaluationStep(step.model, step.names, by_sample or mean, step.by_keyword).eval()
    evaluation = _captured(evaluation_step, tensors, narrow)
    single = None
    if not options.inference and by_sample is None and tensors[0].shape[0] > 1:
        watch.begin("capture the evaluation graph at batch 1")
        with suppress(CaptureError):  # not every sound model runs on one sample; `_notices` says so
            ones = tuple(tensor[:1].clone() for tensor in tensors)
            single = _traced_or_run(evaluation_step, ones, narrow)
    return Captures(training, evaluation, single, per_sample_loss=by_sample is not None)


def _captured(
    step: nn.Module, tensors: Sequence[Tensor], narrow: torch.dtype | None, loss_name: str | None = None
) -> CapturedGraph:
    """The captured graph of a step. Raises an error if a capture would lose something that the model does. After a
    failed capture PyTorch runs the model once, because its messages are better than a tracer's."""
    is_checked = refuse_lost_effects(step, tensors, keeps_backwards=narrow is None)
    try:
        captured = _traced_or_run(step, tensors, narrow)
    except CaptureError as error:
        raise explained(error, step, tensors, loss_name) from error
    if isinstance(step, TrainingStep) and not starts_a_backward(captured, any_shape=step.any_loss):
        check_loss(loss_in(run_eagerly(step, tensors)), loss_name, any_shape=step.any_loss)
    if not is_checked:
        refuse_lost_effects(step, tensors, fake=False, keeps_backwards=narrow is None)
    return captured


def _traced_or_run(step: nn.Module, tensors: Sequence[Tensor], narrow: torch.dtype | None) -> CapturedGraph:
    """The captured graph of a step: traced, or else as Python runs it. Raises the CaptureError of the trace."""
    capture = capture_training if isinstance(step, TrainingStep) else capture_evaluation
    try:
        return capture(step, tensors, narrow=narrow)
    except CaptureError as error:
        if narrow is None:
            with suppress(CaptureError):
                return capture_by_running(step, tensors)
        raise error


def _document(program: Program, model: nn.Module, options: CompileOptions, metadata: Mapping[str, str]) -> PefDocument:
    ours = {"sambasim": __version__, "torch": torch.__version__, "model": repr(model)}
    how = options.model_dump(mode="json", include=set(BUILD_FIELDS) - {"output_folder"})
    return PefDocument(
        program=program,
        data_source=options.data_source(),
        compile_options={"model": options.model.model_dump(mode="json"), **how},
        training_defaults=options.training_defaults(),
        metadata={**metadata, **ours, **_exemptions(model)},
    )


def _exemptions(model: nn.Module) -> dict[str, str]:
    """Metadata of the PEF: what is exempt from exactness."""
    sizes = {module.hidden_size for module in model.modules() if isinstance(module, nn.GRU)}
    inexact = sorted(size for size in sizes if size % _GRU_EXACT_MULTIPLE)
    if not inexact:
        return {}
    of_sizes = f"GRU of hidden size {', '.join(map(str, inexact))}"
    return {"exempt_from_exactness": f"{of_sizes}: gradients may differ from eager in the last bits"}


def _gathered(program: Program) -> Iterator[str]:
    """What the ranks along tp gather because an operator cannot work on parts."""
    graph = program.training or program.evaluation
    ranks = next((axis.size for axis in program.mesh if axis.name == TENSOR), 1)
    received: Counter[str] = Counter()
    for one in gathers(graph, TENSOR, ranks):
        reader = f"{one.operator} of {general(one.module)}" if one.module else one.operator
        received[reader] += one.received_bytes
    if received:
        each = ", ".join(f"{reader} ({format_bytes(size_bytes)})" for reader, size_bytes in received.most_common())
        one_pass = "pass" if program.schedule is None else "micro-batch"
        yield f"gathered along tp, {format_bytes(received.total())} a {one_pass}, to compute whole: {each}"


def _notices(program: Program, model: nn.Module) -> list[str]:
    notices = [*_gathered(program)]
    tensors = (*model.named_parameters(), *model.named_buffers())
    strided = [path for path, tensor in tensors if not tensor.is_contiguous()]
    if strided:
        notices.append(
            f"stored contiguously in the PEF: {', '.join(strided)}; results equal PyTorch's on contiguous tensors, and "
            "with the strides of the model PyTorch may differ in the last bits"
        )
    if torch.__version__.split("+")[0] not in TESTED_TORCH:
        notices.append(f"torch {torch.__version__} is not among the tested releases: {', '.join(TESTED_TORCH)}")
    if program.training is None:
        return notices
    if not program.per_sample_loss and program.batch_size > 1 and program.single is None:
        notices.append(
            "the evaluation graph cannot be captured at batch 1: the last samples, where they do not fill a batch "
            f"of {program.batch_size}, are left out of evaluation"
        )
    members = (member for group in program.groups for member in group.members)
    trained = {path for member in members for path in program.symbols[member.parameter].torch_names}
    wanted = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    unused = sorted(wanted - trained)
    if unused:
        notices.append(f"parameters without a gradient, which training leaves as they are: {', '.join(unused)}")
    return notices
