"""`sambasim verify --against`: an existing PEF beside a model, later than its compile."""

from pathlib import Path

from sambasim.commands.child import OnPhase, in_child
from sambasim.commands.proof.eager import LiveModel
from sambasim.commands.proof.prove import Proof, prove
from sambasim.compiler.capture.step import TARGET
from sambasim.compiler.front import build_model, example_batch
from sambasim.data.sources import open_source
from sambasim.errors import CaptureError, ModelError, OptionError
from sambasim.options.base import build
from sambasim.options.compile import BUILD_FIELDS, CompileOptions
from sambasim.options.grammar import SYNTHETIC
from sambasim.options.training import DataOptions, LossOptions, ModelOptions, OptimizerOptions, TrainingOptions
from sambasim.pef import PefDocument, read
from sambasim.runtime.run.replica import input_specs

_OF_AN_APP = "step_sha256"
"""A key of metadata that only apps write."""

_OTHER_ARGUMENTS = "name the model that was compiled, or a function without arguments that returns one like it"


def verify_against(path: Path, target: str, steps: int | None = None, on_phase: OnPhase = lambda phase: None) -> Proof:
    """Compare the PEF at `path` with the model that `target` names, which takes the weights of the PEF, on batches of
    the PEF's data, or random ones where it names none. Raises CaptureError for a difference, and OptionError for a PEF
    whose loss is not known by a name."""
    document = read(path)
    options = _options_of(document, target)
    specs = tuple(input_specs(document.program))
    if _OF_AN_APP in document.metadata:
        remedy = "compile it again by its app, which compares it: python APP.py compile"
        raise OptionError(f"{path.name} was compiled by an app, whose optimizers it does not name", remedy=remedy)
    if options.loss is None and any(spec.name == TARGET for spec in specs):
        what = f"{path.name} was compiled in Python with a function as its loss, which it does not name"
        raise OptionError(
            what, remedy="compile it again in Python, which compares it; or give the loss as module:function"
        )

    def proof(phase: OnPhase) -> Proof:
        phase("build the model")
        try:
            model = build_model(options)
        except ModelError as error:
            if "--set" in (error.remedy or ""):  # which `verify` has not
                error.remedy = _OTHER_ARGUMENTS
            raise
        phase("read the data")
        source = open_source(options.data, specs)
        inputs, by_keyword, arguments = example_batch(model, options, source=source)
        live = LiveModel(model, inputs, by_keyword, arguments=arguments)
        phase("compare with eager PyTorch")
        return prove(path, live, options, source, steps, with_own_weights=False)

    try:
        return in_child(proof, on_phase)
    except CaptureError as error:
        error.remedy = "name the model that was compiled; if it has changed since, compile it again"
        raise


def _options_of(document: PefDocument, target: str) -> CompileOptions:
    """What the PEF was compiled with, for the model that `target` names."""
    given, defaults = document.compile_options, document.training_defaults
    model = given.get("model")
    is_same = isinstance(model, dict) and _place(str(model.get("target") or target)) == _place(target)
    args = model.get("args") if isinstance(model, dict) and is_same else None
    data = dict(document.data_source)
    if data.get("source") is None:
        data["source"] = SYNTHETIC
    parts: dict[str, object] = {name: value for name, value in given.items() if name in BUILD_FIELDS}
    parts |= {
        "model": build(ModelOptions, {"target": target, "args": args or {}}, where=f"--against {target}"),
        "data": DataOptions.model_validate(data),
        "training": TrainingOptions.model_validate(defaults["training"]),
    }
    for name, kind in (("loss", LossOptions), ("optimizer", OptimizerOptions)):
        parts[name] = None if defaults.get(name) is None else kind.model_validate(defaults[name])
    return build(CompileOptions, parts)


def _place(target: str) -> tuple[str, str]:
    """Of a model: its module, or its file without the folder, which may be named from another one; and its name."""
    module, _, name = target.rpartition(":")
    return (Path(module).name if module.endswith(".py") else module), name
