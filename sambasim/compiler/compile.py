"""Model, example batch, loss, optimizer and options in; one PEF out."""

import time
from collections.abc import Callable, Mapping, Sequence
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
    capture_evaluation,
    capture_training,
    starts_a_backward,
)
from sambasim.compiler.collector import rare_collections
from sambasim.compiler.constants import made_contiguous
from sambasim.compiler.explain import explained, refuse_lost_effects
from sambasim.compiler.fit import check_tensors
from sambasim.compiler.losses import per_sample_loss, training_loss
from sambasim.compiler.passes import Pass, run_pipeline
from sambasim.compiler.passes.data_parallel import AddDataParallel
from sambasim.compiler.passes.fits import Fits
from sambasim.compiler.passes.optimizer import AttachOptimizers, Update
from sambasim.compiler.passes.partition import Partition
from sambasim.compiler.passes.placement import Place
from sambasim.compiler.precision import STORED, inputs_in, stored_in
from sambasim.compiler.step import (
    EvaluationStep,
    TrainingStep,
    check_loss,
    loss_in,
    promote_plain_tensors,
    restore_plain_tensors,
    run_eagerly,
)
from sambasim.compiler.trial import variables_are_tensors
from sambasim.errors import CaptureError, ModelError
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import load_device
from sambasim.ir.program import Program
from sambasim.options.compile import BuildOptions, CompileOptions
from sambasim.options.training import LossOptions
from sambasim.pef import PefDocument, write
from sambasim.pef.lookup import record_compiled

_GRU_EXACT_MULTIPLE = 32
"""Hidden sizes of a GRU that are multiples of this give the bits of eager PyTorch: see docs/concepts.md."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compilation made: where the PEF is, its program, notices for the user, and seconds by phase."""

    path: Path
    program: Program
    digest: str
    notices: tuple[str, ...]
    phases_s: Mapping[str, float]


class Stopwatch:
    """Tells `hear` what begins, and keeps how long each phase took."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear = hear
        self._phase: str | None = None
        self._began_s = 0.0
        self.phases_s: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """End the phase before, and begin `phase`."""
        self.end()
        self._phase, self._began_s = phase, time.perf_counter()
        self._hear(phase)

    def end(self) -> None:
        """End the phase that is under way."""
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
    hear: Callable[[str], None] = lambda phase: None,
) -> Compiled:
    """Compile `model` for the example batch `inputs` (by name, batch first) and write `OUTPUT/NAME/NAME.pef`.

    `by_keyword` says that the model is called with its inputs by name; `updates` are the optimizers, if it is not the
    one of `options`; with `any_loss`, a model's first output may be of any shape. `hear` is told each phase as it
    begins.
    A model in training mode is captured as it is, with those of its modules that are set to eval() left so; one in
    evaluation mode as a whole is captured after `model.train()`. The model is left as it was.
    Raises ModelError and CaptureError for what the model does wrong.
    """
    watch = Stopwatch(hear)
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
    """The graphs of `model`, without optimizer and data parallelism: what takes the time of a compilation.

    With `any_loss`, the model's loss may be any of its outputs, those at `loss_indices` if there are any.
    """
    modes = [(module, module.training) for module in model.modules()]
    promoted = promote_plain_tensors(model)
    dtype = STORED[options.dtype]
    inputs = inputs_in(dtype, inputs)
    try:
        check_tensors(model, training=not options.inference)
        with rare_collections(), stored_in(dtype, model), made_contiguous(model), variables_are_tensors():
            captures = _capture(model, inputs, options, by_keyword, any_loss, loss_indices, watch)
            watch.begin("translate to the graph")
            batch_size = next(iter(inputs.values())).shape[0]
            return build(options.name, model, inputs, captures, batch_size)
    finally:
        restore_plain_tensors(promoted)
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
    """What was captured, through the passes that `options` ask for, and into the PEF; `metadata` goes there too."""
    program = run_pipeline(built.program, pipeline(options, updates), watch.begin)
    watch.begin("write the PEF")
    written = write(options.pef_path, _document(program, model, options, metadata or {}), built.weights)
    watch.end()
    notices = [*_notices(program, model), *_unrecorded(written.digest)]
    return Compiled(options.pef_path, program, written.digest, tuple(notices), watch.phases_s)


def pipeline(options: CompileOptions, updates: Sequence[Update] | None = None) -> Sequence[Pass]:
    """The passes that `options` ask for, in order. The optimizers are `updates`, or else the one of `options`."""
    budget = budget_of(load_device(options.arch), load_calibration(), options.num_tiles)
    passes: list[Pass] = [Partition(options.opt_level, budget)]
    if updates is None and options.optimizer is not None:
        updates = [Update(options.optimizer.name, options.optimizer.hyperparameters())]
    if updates and not options.inference:
        passes.append(AttachOptimizers(tuple(updates), options.stochastic_rounding, options.gradient_groups))
    if options.data_parallel:
        passes.append(AddDataParallel(options.world_size))
    return [*passes, Place(), Fits(budget)]


def _capture(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    options: CompileOptions,
    by_keyword: bool,
    any_loss: bool,
    loss_indices: tuple[int, ...],
    watch: Stopwatch,
) -> Captures:
    names, tensors = tuple(inputs), tuple(inputs.values())
    widened = STORED[options.dtype] is not None
    loss: LossOptions | None = None if options.inference else options.loss
    training = None
    if not options.inference:
        watch.begin("capture the training step")
        mean = training_loss(loss.name, loss.args) if loss else None
        step = TrainingStep(model, names, mean, by_keyword, any_loss, loss_indices)
        if not model.training:
            model.train()
        training = _capture_training(step, tensors, loss.name if loss else None, widened)
    watch.begin("capture the evaluation graph")
    by_sample = per_sample_loss(loss.name, loss.args) if loss else None
    mean_only = training_loss(loss.name, loss.args) if loss and by_sample is None else None
    evaluation_step = EvaluationStep(model, names, by_sample or mean_only, by_keyword).eval()
    evaluation = _capture_evaluation(evaluation_step, tensors, widened)
    single = None
    if not options.inference and by_sample is None and tensors[0].shape[0] > 1:
        watch.begin("capture the evaluation graph at batch 1")
        with suppress(CaptureError):  # not every sound model runs on one sample; `_notices` tells it
            ones = tuple(tensor[:1].clone() for tensor in tensors)
            single = capture_evaluation(evaluation_step, ones, widened=widened)
    return Captures(training, evaluation, single, per_sample_loss=by_sample is not None)


def _capture_training(
    step: TrainingStep, tensors: Sequence[Tensor], loss_name: str | None, widened: bool
) -> CapturedGraph:
    """The captured training step, unless a capture would lose something that the model does. If the capture fails,
    PyTorch itself runs the model once: what is wrong there already is told in its words, which are better than those
    of a tracer. A model that is sound is spared that run."""
    looked = refuse_lost_effects(step, tensors)
    try:
        captured = capture_training(step, tensors, widened=widened)
    except CaptureError as error:
        raise explained(error, step, tensors, loss_name) from error
    if not starts_a_backward(captured, any_shape=step.any_loss):
        check_loss(loss_in(run_eagerly(step, tensors)), loss_name, any_shape=step.any_loss)
    if not looked:
        refuse_lost_effects(step, tensors, fake=False)
    return captured


def _capture_evaluation(step: EvaluationStep, tensors: Sequence[Tensor], widened: bool) -> CapturedGraph:
    """The captured evaluation graph, unless a capture would lose something that the model does."""
    looked = refuse_lost_effects(step, tensors)
    try:
        captured = capture_evaluation(step, tensors, widened=widened)
    except CaptureError as error:
        raise explained(error, step, tensors, None) from error
    if not looked:
        refuse_lost_effects(step, tensors, fake=False)
    return captured


def _document(program: Program, model: nn.Module, options: CompileOptions, metadata: Mapping[str, str]) -> PefDocument:
    ours = {"sambasim": __version__, "torch": torch.__version__, "model": repr(model)}
    how = options.model_dump(mode="json", include=set(BuildOptions.model_fields) - {"output_folder"})
    return PefDocument(
        program=program,
        data_source=options.data_source(),
        compile_options={"model": options.model.model_dump(mode="json"), **how},
        training_defaults=options.training_defaults(),
        metadata={**metadata, **ours, **_exemptions(model)},
    )


def _exemptions(model: nn.Module) -> dict[str, str]:
    """What a run of this model says in its summary: where its bits are not those of eager PyTorch."""
    sizes = {module.hidden_size for module in model.modules() if isinstance(module, nn.GRU)}
    odd = sorted(size for size in sizes if size % _GRU_EXACT_MULTIPLE)
    if not odd:
        return {}
    return {"exempt_from_exactness": f"GRU of hidden size {odd[0]}: gradients may differ from eager in the last bits"}


def _unrecorded(digest: str) -> list[str]:
    why = record_compiled(digest)
    if why is None:
        return []
    return [f"cannot record that this account compiled the PEF ({why}): `sambasim run` will ask for --trust"]


def _notices(program: Program, model: nn.Module) -> list[str]:
    notices = []
    tensors = (*model.named_parameters(), *model.named_buffers())
    strided = [path for path, tensor in tensors if not tensor.is_contiguous()]
    if strided:
        notices.append(
            f"not contiguous in the model, and stored contiguously in the PEF: {', '.join(strided)}; results have the "
            "bits of PyTorch on contiguous tensors, and with these strides it may differ from them in the last bits"
        )
    if torch.__version__.split("+")[0] not in TESTED_TORCH:
        notices.append(f"torch {torch.__version__} is not among the tested releases: {', '.join(TESTED_TORCH)}")
    single_wanted = program.training is not None and not program.per_sample_loss and program.batch_size > 1
    if single_wanted and program.single is None:
        notices.append(
            "the evaluation graph cannot be captured at batch 1: the last samples, where they do not fill a batch "
            f"of {program.batch_size}, are left out of evaluation"
        )
    if program.training is not None:
        trained = {member.parameter for group in program.groups for member in group.members}
        wanted = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        paths = {path: parameter for path, parameter in model.named_parameters() if id(parameter) in wanted}
        trained_paths = {path for name in trained for path in program.symbols[name].torch_names}
        unused = sorted(set(paths) - trained_paths)
        if unused:
            notices.append(f"parameters without a gradient, which training leaves as they are: {', '.join(unused)}")
    return notices


def check_model(model: object, target: str) -> nn.Module:
    """`model`, if it is an nn.Module. Raises ModelError otherwise."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"{target} gives a {type(model).__name__}, not a torch.nn.Module",
            remedy="name an nn.Module class, or a function that returns one",
        )
    return model
