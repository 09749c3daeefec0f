"""How names, targets, data sources, inputs, steps and checkpoint intervals are written; checked before any import."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from math import isfinite, prod
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, NamedTuple

from sambasim.optimizers import OPTIMIZERS
from sambasim.options.problem import Problem, Refused, before, checked, near_file, nearest, one_of, parsable, suggested

BUILTIN_SOURCES = {"digits": "sambasim.quickstart.digits:digits"}
SYNTHETIC = "synthetic"
DATA_SUFFIXES = (".npz", ".safetensors")


def split_target(target: str) -> tuple[str, str]:
    """`"path/file.py:Model"` -> `("path/file.py", "Model")`; the name is empty if there is no colon."""
    module, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    return module, name


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def target_problems(target: str) -> Iterator[Problem]:
    """Why `target` is not a target, with the most likely correction."""
    module, name = split_target(target)
    parent, _, last = target.rpartition(".")
    remedy = None
    if ":" not in target and target.endswith(".toml"):
        remedy = f"a config is no model: sambasim compile {target}, without --config and model.target"
    elif ":" not in target and target.endswith(".py"):
        remedy = f"add the name: {target}:NAME"
    elif ":" not in target and parent and _is_dotted(target):
        remedy = f"put a colon before the name: {parent}:{last}"
    elif _is_dotted(name):
        if (module.endswith(".py") and Path(module).stem) or _is_dotted(module):
            return
        remedy = f"a file's name ends in .py: {module}.py:{name}" if os.sep in module else None
    yield Problem("", "must be package.module:name or path/file.py:name", remedy, target)


def _problems_among(known: Collection[str], name: str, others: Iterable[str] = ()) -> Iterator[Problem]:
    if ":" in name:
        yield from target_problems(name)
    elif name not in known:
        remedy = suggested(name.removesuffix("_loss").removesuffix("loss"), known)
        yield Problem("", f"must be {one_of([*known, 'module:function', *others])}", remedy, name)


def _source_problems(source: str) -> Iterator[Problem]:
    if not source.endswith(DATA_SUFFIXES):
        files = (f"FILE{suffix}" for suffix in DATA_SUFFIXES)
        yield from _problems_among((*BUILTIN_SOURCES, SYNTHETIC), source, files)


Target = Annotated[str, checked(target_problems)]
Source = Annotated[str, checked(_source_problems)]

LOSS_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("ignore_index", "label_smoothing", "weight"), "mse": (), "l1": (), "smooth_l1": ("beta",),
    "huber": ("delta",), "bce_with_logits": ("pos_weight",), "nll": ("ignore_index", "weight"),
    "kl_div": ("log_target",),
}  # fmt: skip
"""The losses of `torch.nn.functional` that have a name here, and the arguments that each takes."""

TARGET = "target"
"""The name of the second operand of a loss that the config names."""


def ignored_class(args: Mapping[str, object]) -> int:
    """The class index that a loss with these arguments leaves out: -100 by default, as in torch."""
    given = args.get("ignore_index")
    return given if isinstance(given, int) else -100


METRICS: Mapping[str, Literal["max", "min"]] = {
    **dict.fromkeys(("accuracy", "precision", "recall", "f1", "auroc", "r2"), "max"),
    **dict.fromkeys(("mae", "mse", "perplexity"), "min"),
}  # fmt: skip
"""The metrics that have a name here, and whether their largest value is the best; also topK, such as top5."""


def is_top_k(name: str) -> bool:
    return re.fullmatch(r"top[1-9][0-9]{0,5}", name) is not None


METRIC_NAMES = (*METRICS, "topK", "module:function")


def _metrics_table(given: object) -> object:
    """Metrics by name, with their options: of `"f1, top5"` or a list of names, without any."""
    names = given.split(",") if isinstance(given, str) else given
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return {name.strip(): {} for name in names}
    return given


def _metrics_problems(table: Mapping[str, object]) -> Iterator[Problem]:
    return (problem for name in table if not is_top_k(name) for problem in _problems_among(METRIC_NAMES[:-1], name))


def _pef_name(name: str) -> Iterator[Problem]:
    if not re.fullmatch(r"\w[\w.+-]*", name):
        what = "must be a plain file name: letters, digits and . _ + -, without a folder"
        yield Problem("", what, "--output-folder sets the folder", name)
    elif name.endswith(".pef"):
        yield Problem("", "must be given without .pef", f"--pef-name {name[:-4] or 'NAME'}", name)


LossName = Annotated[str, checked(partial(_problems_among, LOSS_ARGUMENTS))]
OptimizerName = Annotated[str, checked(partial(_problems_among, OPTIMIZERS))]
PefName = Annotated[str, checked(_pef_name)]


def absolute_path(path: str | Path, folder: Path) -> Path:
    """`path` relative to `folder`, made absolute; a leading `~` is the home folder."""
    return Path(os.path.abspath(folder / Path(path).expanduser()))


def _absolute(text: str, folder: Path, is_source: bool) -> str:
    """A target or a source with its file relative to `folder`, made absolute; one in a module does not change."""
    if is_source and text.endswith(DATA_SUFFIXES):
        return str(absolute_path(text, folder))
    module, name = split_target(text)
    return f"{absolute_path(module, folder)}:{name}" if name and module.endswith(".py") else text


_NAMES = "model.target", "data.source", "data.collate", "loss.name", "optimizer.name", "evaluation.data"


def absolute_names(mapping: Mapping[str, object], folder: Path) -> dict[str, object]:
    result = dict(mapping)
    for name, _, key in (dotted.partition(".") for dotted in _NAMES):
        table = result.get(name)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            result[name] = table = table | {key: _absolute(table[key], folder, key in ("source", "data"))}
        if isinstance(table, dict) and isinstance(groups := table.get("groups"), list):
            result[name] = table | {"groups": [absolute_names({name: group}, folder)[name] for group in groups]}
    evaluation: Any = result.get("evaluation")
    given = evaluation.get("metrics") if isinstance(evaluation, dict) else None
    if isinstance(metrics := _metrics_table(given), dict):
        metrics = {_absolute(name, folder, is_source=False): options for name, options in metrics.items()}
        # A list replaces others.
        result["evaluation"] = evaluation | {"metrics": metrics if isinstance(given, dict) else [*metrics]}
    return result


def _json_problems(value: object, name: str = "") -> Iterator[Problem]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _json_problems(inner, f"{name}.{key}" if name else key)
            else:
                yield Problem(name, "must have names that are text", given=key)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _json_problems(inner, name)
    elif isinstance(value, float) and not isfinite(value):
        yield Problem(name, "must be a finite number", given=value)
    elif value is not None and not isinstance(value, str | int | float):
        yield Problem(name, "must be text, a number, true or false, a list or a table", given=value)


JsonTable = Annotated[dict[str, object], checked(_json_problems)]
"""Keyword arguments for code of the user: anything that JSON can hold, as a PEF stores them as JSON."""
Metrics = Annotated[dict[str, JsonTable] | None, before(_metrics_table), checked(_metrics_problems)]

FLOAT_DTYPES = ("float32", "float64", "float16", "bfloat16")
INTEGER_LARGEST = {"int64": 2**63 - 1, "int32": 2**31 - 1, "int16": 2**15 - 1, "int8": 2**7 - 1, "uint8": 2**8 - 1}
DTYPES = (*FLOAT_DTYPES, *INTEGER_LARGEST, "bool")
"""The dtypes that a PEF can hold; a test compares them with those of `ir`."""

_INPUT = r"\s*(\w+)\s*\[\s*((?:\d+\s*(?:,\s*\d+\s*)*,?\s*)?)\]\s*(?:<\s*(\d+)\s*)?"


class InputSpec(NamedTuple):
    """Dtype and shape of one sample of input `name`. Integers are below `exclusive_bound`, if it is given."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    exclusive_bound: int | None = None

    def __str__(self) -> str:
        bound = "" if self.exclusive_bound is None else f" < {self.exclusive_bound}"
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{bound}"

    @property
    def numel(self) -> int:
        return prod(self.shape)


def parse_input(name: str, text: str) -> InputSpec:
    """`parse_input("target", "int64[] < 10")` -> the spec. Raises Refused, a ValueError."""
    match, what, remedy = re.fullmatch(_INPUT, text), "", None
    dtype, extents, bound_text = match.groups() if match else ("", "", None)
    shape = tuple(int(extent) for extent in extents.split(",") if extent.strip())
    bound = None if bound_text is None else int(bound_text)
    largest = INTEGER_LARGEST.get(dtype)
    if match is None:
        what = "must be a dtype and the shape of one sample: float32[784], or int64[] < 10 for a class index"
    elif dtype not in DTYPES:
        what, remedy = f"has the dtype {dtype}; it must be {one_of(DTYPES)}", suggested(dtype, DTYPES)
    elif 0 in shape:
        what = "must have at least one element along each dimension"
    elif bound is not None and largest is None:
        what = f"has a bound, which only integers can have; {dtype} is not an integer dtype"
    elif bound is not None and largest is not None and not 1 <= bound <= largest:
        what = f"must have a bound from 1 to {largest}"
    if what:
        raise Refused(Problem(name, what, remedy, text))
    return InputSpec(name, dtype, shape, bound)


def synthetic_data(inputs: Mapping[str, object]) -> str:
    """What to type for synthetic samples of `inputs`."""
    table = ", ".join(f'{name} = "{spec}"' for name, spec in inputs.items())
    return f"--set data.source={SYNTHETIC} --set {quote(f'data.inputs={{{table}}}')}"


def parse_inputs(texts: Mapping[str, str]) -> tuple[InputSpec, ...]:
    return tuple(parse_input(name, text) for name, text in texts.items())


Inputs = Annotated[dict[str, str], parsable(parse_inputs)]

LAST_STEP = 10**18  # of a range without end

_RANGE = r"(?P<first>[0-9]{0,18})(?P<dash>-?)(?P<last>[0-9]{0,18})"


def step_range(text: str | None) -> range:
    """The steps of `text`, counted from 1: `17`, `100-120`, `100-` or `-20`; all for None. Raises Refused."""
    match = re.fullmatch(_RANGE, "1-" if text is None else text.strip())
    what = "must be a step, or a range of them"
    if match is not None and (match["first"] or match["last"]):
        first = int(match["first"] or 1)
        last = int(match["last"] or (LAST_STEP if match["dash"] else first))
        if 1 <= first <= last:
            return range(first, last + 1)
        what = "steps count from 1" if first < 1 else "the last step is before the first"
    raise Refused(Problem("", what, "17, 100-120 or 100-", text))


Steps = Annotated[str, parsable(step_range)]


class Cadence(NamedTuple):
    every: int
    unit: Literal["steps", "epochs", "s"]


_EXAMPLE = "--checkpoint-every 100, 1epoch, 30s or 10min"
_CADENCE = r"([0-9]{1,9}) ?(|steps?|epochs?|s|min|h)"
_UNITS: Mapping[str, Cadence] = {
    **dict.fromkeys(("", "step", "steps"), Cadence(1, "steps")),
    **dict.fromkeys(("epoch", "epochs"), Cadence(1, "epochs")),
    "s": Cadence(1, "s"), "min": Cadence(60, "s"), "h": Cadence(3600, "s"),
}  # fmt: skip


def parse_cadence(text: str, units: str = "epochs, s, min or h", remedy: str = _EXAMPLE) -> Cadence:
    """`50`, `50steps`, `1epoch`, `30s`, `10min` or `2h`. Raises Refused for any other text, and for other `units`."""
    match = re.fullmatch(_CADENCE, text.strip())
    unit = _UNITS[match[2]] if match else None
    if match is None or unit is None or int(match[1]) == 0 or (unit.unit == "s" and "min" not in units):
        raise Refused(Problem("", f"must be a number of steps, or one of {units}, and at least 1", remedy, text))
    return unit._replace(every=int(match[1]) * unit.every)


parse_interval = partial(parse_cadence, units="epochs", remedy="--evaluate-every 100 or 2epochs")
_as_text = before(lambda given: str(given) if type(given) is int else given)
Interval = Annotated[str, _as_text, parsable(parse_interval)]
IntervalOrTime = Annotated[str, _as_text, parsable(parse_cadence)]

TRANSFORMERS = "transformers"  # the package whose models are made from a config

_PACKAGES = (TRANSFORMERS, "torch", "torchvision", "torchaudio", "timm", "diffusers")
"""Packages of models. Many begin with `torch`: by difflib, names are `_OF_A_SLIP` alike if one is a slip."""

_OF_A_SLIP = 0.9
_DEFINED = r"(?m)^(?:class|def) +(\w+)"
_CLASS = r"(?m)^class (\w+)\("


def missing(target: str) -> Problem | None:
    """Why `target` names nothing, with a remedy. None if it names something, or if only an import could tell."""
    module, name = split_target(target)
    package, first = module.partition(".")[0], name.partition(".")[0]
    if module.endswith(".py"):
        path = absolute_path(module, Path.cwd())
        return missing_file(path, "path/file.py:NAME") or _missing_in_file(path, first)
    spec = _spec(package)
    if spec is None:
        return missing_module(package, target)
    if module != TRANSFORMERS:
        return None
    folders = spec.submodule_search_locations or ()
    files = (file for folder in folders for file in Path(folder).glob("models/*/modeling_*.py"))
    classes = {name for file in files for name in re.findall(_CLASS, file.read_text(encoding="utf-8"))}
    remedy = suggested(first, sorted(classes)) or f"check the name, or pip install -U {TRANSFORMERS}"
    return None if first in classes else Problem("", f"{TRANSFORMERS} has no model {first}", remedy)


def missing_file(path: Path, another: str) -> Problem | None:
    """`another`: the form of another name."""
    remedy = near_file(path) or f"check the path, or name another: {another}"
    return None if path.is_file() else Problem("", f"there is no file {path}", remedy)


def _missing_in_file(path: Path, name: str) -> Problem | None:
    text = path.read_text(encoding="utf-8", errors="replace")
    defined = re.findall(_DEFINED, text)
    remedy = suggested(name, defined) or f"it has {', '.join(defined) or 'nothing of its own'}"
    may_be_there = re.search(rf"\b{name}\b|import \*|__getattr__", text)
    return None if may_be_there else Problem("", f"{path} has no {name}", remedy)


def missing_module(module: str, target: str) -> Problem:
    """The problem of a `target` whose module, or `module` above it, cannot be imported."""
    from pkgutil import iter_modules

    package, (own, name), here = module.partition(".")[0], split_target(target), Path.cwd()
    what, spec = f"there is no module {module}", _spec(package)
    if spec is not None:
        parent, _, last = module.rpartition(".")
        inside = [info.name for info in iter_modules(spec.submodule_search_locations or [])]
        guess = nearest(last, inside) if parent == package else None
        remedy = f"did you mean {parent}.{guess}:{name}?" if guess else f"check the name, or the version of {package}"
        return Problem("", what, remedy)
    what = f"there is no module {package}"
    if package == TRANSFORMERS:
        return Problem("", what, f"pip install {TRANSFORMERS}")
    slips = get_close_matches(package, _PACKAGES, n=1, cutoff=_OF_A_SLIP)
    guess = slips[0] if slips else nearest(package, [info.name for info in iter_modules([str(here)])])
    if guess not in (None, package):
        return Problem("", what, f"did you mean {guess}{own.removeprefix(package)}:{name}?")
    for folder in (here.parent, *sorted(folder for folder in here.iterdir() if folder.is_dir())):
        if (folder / package).is_dir() or (folder / f"{package}.py").is_file():
            return Problem("", what, f"run it from the folder that holds {package}: cd {os.path.relpath(folder)}")
    install = f"pip install {package}, or for a file of yours path/file.py:{name}"
    return Problem("", f"{what}: no such package is installed, and no such folder or file is near", install)


def _spec(package: str) -> ModuleSpec | None:
    """Of a package or module without dots, in this folder or installed."""
    from importlib.util import find_spec

    return PathFinder.find_spec(package, [os.getcwd()]) or find_spec(package)
