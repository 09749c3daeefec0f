"""Flags of `compile` and `run`: metadata of the fields that they set, all of which are in `fields.py`."""

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from sambasim.options.problem import one_of

MODEL, DATA, TRAINING, PARALLEL = "Model and PEF", "PEF and data", "Training", "Replicas and gradient sync"
EVALUATION = "Evaluation"
DEVICE, OUTPUT, CHECKPOINTS, INFERENCE = "Device and sections", "Output", "Checkpoints", "Inference"
NUMERICS, OTHER = "Numerics", "Other"
PANELS = (MODEL, DATA, TRAINING, EVALUATION, PARALLEL, DEVICE, OUTPUT, CHECKPOINTS, INFERENCE, NUMERICS, OTHER)


class Flag(NamedTuple):
    """How a field is given on the command line. `usage` has its names and how `--help` shows the value; `panel` is
    that of its class by default; one that is `compiled_in` no run has; `default` is shown as such; `bare` is the value
    of the flag without one; `choices` makes one switch for each value; `values` stand for `{values}` in the help;
    `training_only` is an error with `run --inference`."""

    usage: str
    panel: str | None = None
    compiled_in: bool = False
    default: str | None = None
    bare: str | None = None
    choices: Mapping[str, str] = MappingProxyType({})
    values: tuple[str, ...] = ()
    training_only: bool = False

    @property
    def names(self) -> list[str]:
        """`["-b", "--batch-size"]`."""
        return [word for word in self.usage.split() if word.startswith("-")]

    @property
    def metavar(self) -> str | None:
        """How `--help` shows the value; None for the name of its type."""
        return next((word for word in self.usage.split() if not word.startswith("-")), None)

    @property
    def typed(self) -> str:
        """The flag in a sentence: `--lr`, `--evaluate or --no-evaluate`."""
        return self.names[-1].replace("/", " or ")


class Setting(NamedTuple):
    """A flag with the option that it sets; `kind` is its type without None, `default` `...` if there is none."""

    keyword: str
    name: str
    flag: Flag
    kind: Any
    default: object
    fields: type[Any]

    @property
    def panel(self) -> str:
        return self.flag.panel or str(self.fields.panel)

    @property
    def help(self) -> str:
        text = " ".join(_docstrings(self.fields.__module__, self.fields.__name__)[self.name.rpartition(".")[2]].split())
        return text.replace("{values}", one_of(self.flag.values)) if self.flag.values else text


def flags_in(tables: Mapping[str, type[Any]], *, of_run: bool = False) -> dict[str, Setting]:
    """The flags in the fields of `tables`, by keyword; `of_run`: without what is compiled in."""
    settings = {}
    for table, fields in tables.items():
        for name, hint in get_type_hints(fields, include_extras=True).items():
            flag = next((metadata for metadata in get_args(hint) if isinstance(metadata, Flag)), None)
            if flag is None or (of_run and flag.compiled_in):
                continue
            keyword = name if flag.choices else flag.names[-1].split("/")[0].strip("-").replace("-", "_")
            dotted, kind = f"{table}.{name}" if table else name, hint
            while get_origin(kind) not in (None, Literal):
                kind = next(part for part in get_args(kind) if part is not type(None))
            settings[keyword] = Setting(keyword, dotted, flag, kind, getattr(fields, name, ...), fields)
    return settings


@cache
def _docstrings(module: str, fields: str) -> Mapping[str, str]:
    """Those below fields, which are in the source alone; it is read only for `--help`, since that takes a while."""
    source = ast.parse(inspect.getsource(sys.modules[module]))
    (body,) = (node.body for node in source.body if isinstance(node, ast.ClassDef) and node.name == fields)
    return {
        ast.unparse(field.target): ast.literal_eval(below.value)
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }
