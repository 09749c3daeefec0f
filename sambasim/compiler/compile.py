"""Model, example batch, loss, optimizer and options in; one PEF out."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sambasim import __version__
from sambasim.compiler.build import Built, Captures, build
from sambasim.compiler.capture import explain
from sambasim.compiler.capture.asked_values import Asked, RandomBranch
from sambasim.compiler.capture.explain import explained, tracer_error
from sambasim.compiler.capture.losses import Loss, per_sample_loss, training_loss
from sambasim.compiler.capture.names import forward_line, source_files
from sambasim.compiler.capture.precision import STORED, inputs_in, stored_in
from sambasim.compiler.capture.state import NotSound, Observed, asked_of, found_sound, observe
from sambasim.compiler.capture.step import EvaluationStep, Losses, TrainingStep
from sambasim.compiler.capture.tensors import check_memory, check_model, dense_gradients, held_by, made_contiguous
from sambasim.compiler.capture.trace import CapturedGraph, capture
from sambasim.compiler.capture.trial import buffers_of_plain_tensors, rare_collections
from sambasim.compiler.notices import exemptions, notice_of_shapes, notices_of
from sambasim.compiler.passes.sequence import pipeline, run_pipeline
from sambasim.compiler.passes.update import Update
from sambasim.errors import CaptureError, DataError, ModelError
from sambasim.ir.program import Program
from sambasim.options.compile import BUILD_FIELDS, CompileOptions
from sambasim.pef import PefDocument, write
from sambasim.pef.files import record_compiled
from sambasim.pef.sources import SOURCES, digests_of_model, record


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
    losses: Losses | None = None,
    loss: Loss | None = None,
    arguments: Mapping[str, object] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
    path: Path | None = None,
) -> Compiled:
    """Compile `model` for the batch `inputs` (by name, batch first) and write `OUTPUT/NAME/NAME.pef`. `updates`
    replaces the optimizer of `options`, and `loss` or `losses` their loss. A model in
    evaluation mode is captured after `model.train()`; the model is left as it was. `path`: see `assemble`. Raises
    ModelError and CaptureError."""
    watch = Stopwatch(on_phase)
    built = capture_model(
        model, inputs, options, by_keyword=by_keyword, losses=losses, loss=loss, arguments=arguments, watch=watch
    )
    return assemble(built, model, options, watch, updates, path=path)


def capture_model(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    options: CompileOptions,
    *,
    by_keyword: bool,
    watch: Stopwatch,
    losses: Losses | None = None,
    loss: Loss | None = None,
    arguments: Mapping[str, object] | None = None,
    quick: bool = False,
) -> Built:
    """The graphs of `model`, without optimizer and data parallelism. `loss` or `losses` replaces that of
    `options`; `arguments`: see `step`. `quick`: the
    training step alone, without observing a step before."""
    modes = [(module, module.training) for module in model.modules()]
    dtype = STORED[options.dtype]
    inputs = inputs_in(dtype, inputs)
    if found := [name for name, tensor in inputs.items() if tensor.is_complex()]:
        what = f"the input {found[0]} is {str(inputs[found[0]].dtype).removeprefix('torch.')}, which a PEF cannot hold"
        raise DataError(what, remedy="give torch.view_as_real(x), and the model torch.view_as_complex(x)")
    try:
        with buffers_of_plain_tensors(model):
            several = options.data_parallel or options.chips > 1
            check_model(model, training=not options.inference, replicas=several)
            with rare_collections(), stored_in(dtype, model), made_contiguous(model), dense_gradients(model):
                mean = _mean_loss(options, loss)
                step = TrainingStep(model, tuple(inputs), mean, by_keyword, losses, arguments)
                tensors = tuple(inputs.values())
                captures = _training_alone(step, tensors) if quick else _capture(step, tensors, options, watch, loss)
                watch.begin("translate to the graph")
                return build(options.name, model, inputs, captures, next(iter(inputs.values())).shape[0])
    except Exception as error:
        if (refused := tracer_error("model", error)) is None:
            raise
        refused.where = refused.where or forward_line(model)
        raise refused from error
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
    path: Path | None = None,
) -> Compiled:
    """Run the passes that `options` ask for on what was captured, and write the PEF, with `metadata`. At a `path` that
    is given it is not recorded as compiled by this account."""
    notices: list[str] = []
    program = run_pipeline(built.program, pipeline(options, updates, model, notices.append), watch.begin)
    watch.begin("write the PEF")
    facts = {**(metadata or {}), **digests_of_model(built.program, built.weights)}
    facts[SOURCES] = record(program, source_files(model), options.model.target or "")
    written = write(path or options.pef_path, _document(program, model, options, facts), built.weights)
    watch.end()
    notices += notices_of(built, program, model)
    notices += notice_of_shapes(program, options.loss.name if options.loss else None)
    if path is None:
        notices += recorded(written.digest)
    return Compiled(path or options.pef_path, program, written.digest, tuple(notices), watch.phases_s)


def recorded(digest: str) -> list[str]:
    """Record that this account compiled the PEF with this digest; a notice if that fails."""
    why = record_compiled(digest)
    told = f"cannot record that this account compiled the PEF ({why}): `sambasim run` will ask for --trust"
    return [told] if why else []


def _mean_loss(options: CompileOptions, given: Loss | None) -> Loss | None:
    if given is not None or options.inference or options.loss is None:
        return given
    return training_loss(options.loss.name, options.loss.args)


def _capture(
    step: TrainingStep, tensors: tuple[Tensor, ...], options: CompileOptions, watch: Stopwatch, given: Loss | None
) -> Captures:
    loss = None if options.inference or given is not None else options.loss
    by_sample = per_sample_loss(loss.name, loss.args) if loss else None
    evaluation = EvaluationStep(step.model, step.names, by_sample or step.loss, step.by_keyword, step.arguments)
    steps: list[TrainingStep | EvaluationStep] = [evaluation] if options.inference else [step, evaluation]
    if not (options.inference or step.model.training):
        step.model.train()
    narrow, name = options.dtype != "fp32", "function" if given is not None else loss.name if loss else None

    def captures(observed: Observed) -> Captures:
        training = single = None
        if not options.inference:
            watch.begin("capture the training step")
            training = _captured(step, tensors, narrow, observed)
        watch.begin("capture the evaluation graph")
        evaluation.eval()
        captured = _captured(evaluation, tensors, narrow, observed)
        if not options.inference and by_sample is None and tensors[0].shape[0] > 1:
            watch.begin("capture the evaluation graph at batch 1")
            with suppress(CaptureError, ModelError):  # not every sound model runs on one sample; `notices_of` says so
                ones = tuple(tensor[:1].clone() for tensor in tensors)
                asked = asked_of(evaluation, ones) if observed.asked[evaluation].answers else None
                single = capture(evaluation, ones, asked, narrow=narrow)
        notices = (*observed.notices, *explain.notices({explain.EVALUATED: captured.kept_buffers}))
        return Captures(training, captured, single, per_sample_loss=by_sample is not None, notices=notices)

    effects = found_sound(steps, tensors, name)
    if effects is not None:
        found = None
        with suppress(CaptureError, ModelError):  # an observed step says it better
            found = captures(Observed({one: Asked() for one in steps}))
        if found is None or (told := effects()) is None:
            raise NotSound("the model has to be observed first")
        return replace(found, notices=(*explain.notices(told), *found.notices))
    watch.begin("observe a step")
    return captures(observe(steps, tensors, name))


def _training_alone(step: TrainingStep, tensors: Sequence[Tensor]) -> Captures:
    """Raises CaptureError, which an observed step says better."""
    captured = capture(step.train(), tensors)
    index = str(captured.losses[0])
    loss = next(node.meta["val"] for node, role in captured.outputs if (role.kind, role.name) == ("output", index))
    if loss.numel() != 1 or not any(role.kind == "tangent" for role in captured.inputs.values()):
        raise CaptureError("the training step returns no loss")
    return Captures(captured, replace(captured, outputs=()), None, per_sample_loss=False)


def _captured(step: nn.Module, tensors: Sequence[Tensor], narrow: bool, observed: Observed) -> CapturedGraph:
    """The captured graph of a step. Raises CaptureError, with all that the observed call shows in its way."""
    try:
        return capture(step, tensors, observed.asked[step], narrow=narrow)
    except RandomBranch:
        raise
    except CaptureError as error:
        call = observed.asked[step].recording
        if not call.ops:  # it was not observed
            raise
        changed = {label.removeprefix("buffer model.") for op in call.ops for label in op.writes}
        check_memory(held_by(step.get_submodule("model")), changed)
        raise explained(error, step, call) from error


def _document(program: Program, model: nn.Module, options: CompileOptions, metadata: Mapping[str, str]) -> PefDocument:
    ours = {"sambasim": __version__, "torch": torch.__version__, "model": repr(model)}
    how = options.model_dump(mode="json", include=set(BUILD_FIELDS) - {"output_folder", "check"})
    return PefDocument(
        program=program,
        data_source=options.data_source(),
        compile_options={"model": options.model.model_dump(mode="json"), **how},
        training_defaults=options.training_defaults(),
        metadata={**metadata, **ours, **exemptions(model)},
    )
