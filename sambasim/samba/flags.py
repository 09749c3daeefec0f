"""Commands and flags of a SambaFlow app, as data: one row a flag. `utils/parser.py` makes the parsers.

A flag of SambaFlow that needs the hardware is `inert`: it is accepted, and a notice says that it has no effect and why.
"""

import logging
import math
import os
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from sambasim.options.compile import CompileOptions

COMPILE, RUN, TEST = "compile", "run", "test"
MEASURE_PERFORMANCE, MEASURE_SECTIONS = "measure-performance", "measure-sections"

COMMANDS: Mapping[str, str] = {
    COMPILE: "Compile the model into a PEF.",
    RUN: "Train or predict with a compiled PEF.",
    TEST: "Compare the results of the PEF with PyTorch's.",
    MEASURE_PERFORMANCE: "Measure how long a step of the PEF takes.",
    MEASURE_SECTIONS: "Measure how long each section of the PEF takes.",
}
"""The commands of an app, with their help."""

EVERYWHERE = tuple(COMMANDS)
_ONLY_COMPILE = (COMPILE,)
WITH_PEF = (RUN, TEST, MEASURE_PERFORMANCE, MEASURE_SECTIONS)
MEASURING = (MEASURE_PERFORMANCE, MEASURE_SECTIONS)


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]  # the spellings, the long one first
    meaning: str
    default: object | Callable[[], object] = None  # if it is not typed; a function is called for each command line
    convert: Callable[[str], object] | None = str  # from the typed text to the value; None for a switch
    commands: tuple[str, ...] = EVERYWHERE  # that accept it
    count: str | None = None  # argparse's `nargs`
    choices: tuple[str, ...] | None = None
    bare: str | None = None  # argparse's `const`
    required: tuple[str, ...] = ()  # the commands that need it
    placeholder: str = "TEXT"
    inert: str | None = None  # why it has no effect; None for a flag that has one
    compiled: bool = False  # `session.compile` reads it, from its `config_dict`

    @property
    def destination(self) -> str:
        """Its attribute of the Namespace: `pef_name` for `--pef-name`."""
        return self.names[0].lstrip("-").replace("-", "_")

    def default_for(self, command: str) -> object:
        """Its value if it is not typed. A computed default is None for commands that do not accept the flag."""
        if callable(self.default):
            return self.default() if command in self.commands else None
        return self.default


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _not_negative(text: str, what: str = "a number of at least 0") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _log_level(text: str) -> str:
    levels = logging.getLevelNamesMapping()
    if text.upper() not in levels:
        raise ArgumentTypeError(f"{text!r} is no logging level; the levels are {', '.join(levels).lower()}")
    return text


DTYPES = ("fp32", "bf16")
TENSOR_PARALLEL = ("batch", "weight")
"""Choices of --tensor-parallel, besides none."""


def _choices(field: str) -> tuple[str, ...]:
    return get_args(CompileOptions.model_fields[field].annotation)


def _flag(
    names: str, meaning: str, default: object = None, convert: Callable[[str], object] | None = str, **more: Any
) -> Flag:
    return Flag(tuple(names.split()), meaning, default, convert, **more)


_switch = partial(_flag, default=False, convert=None)
_count = partial(_flag, convert=_at_least_one, placeholder="N")
_file = partial(_flag, placeholder="FILE")

_ONE_BY_ONE = "batches run one after another"
_OWN_PLACEMENT = "sambasim cuts and places sections by its own rules"
_NO_TILING = "device memory holds each tensor whole"
_NO_DEVICE = "there is no device"

FLAGS: tuple[Flag, ...] = (
    _count("--batch-size -b", "Samples of one replica in a batch; by default those of the PEF, or 1.", lambda: 1),
    _count("--microbatch-size -mb", "Samples that the device computes together.",
           inert="the device computes the whole batch at once"),
    _count("--grad-accumulation-steps", "Batches whose gradients make one optimizer step.", 1),
    _switch("--inference", "Forward only: no loss, no optimizer. Of compile and run.", compiled=True),
    _switch("--data-parallel", compiled=True,
            meaning="Compile: add the sections that sync replicas. Otherwise: let the ranks of mpirun be replicas."),
    _flag("--data-parallel-mode", "How replicas are laid out.", "normal", placeholder="MODE",
          inert="the only mode is normal"),
    _flag("--mapping", "How the graph is mapped onto the device.", "section", choices=("section", "spatial"),
          inert="sections run one after the other, which is the mapping section"),
    _flag("--dtype", "The type of stored numbers: fp32 unless compile says bf16; optional elsewhere.", choices=DTYPES,
          compiled=True),
    _flag("--log-level", "The level of samba_logger: debug, info, warning …", None, _log_level, placeholder="LEVEL"),
    _switch("--verbose -v", "Print more.", inert="there is nothing more to print"),
    _switch("--debug", "Keep what helps to debug the compiler.", inert="the vendor's compiler is not here"),
    _file("--distlearn-config", "The layout of replicas over nodes.", inert="mpirun lays out replicas over nodes"),
    _file("--gold-file-path", "Expected results: TestWithGold writes them once, and then compares."),
    _switch("--visualize", "Draw the graph.", inert="sambasim inspect shows the graph of a PEF"),
    _switch("--enable-profiler", "Let the device profile itself.", inert=_NO_DEVICE),
    # compile
    _flag("--pef-name", "The PEF is OUTPUT_FOLDER/NAME/NAME.pef.",
          lambda: f"{time.strftime('%Y%m%d_%H%M%S')}_{os.getpid()}", lambda text: text.removesuffix(".pef"),
          placeholder="NAME", commands=_ONLY_COMPILE),
    _flag("--output-folder", "The folder of PEFs.", "out", placeholder="FOLDER", commands=_ONLY_COMPILE),
    _count("--world-size -ws --ws", "The least number of replicas.", 1, compiled=True,
           commands=(COMPILE, MEASURE_PERFORMANCE)),
    _switch("--o0", "One operator in a section.", compiled=True, commands=_ONLY_COMPILE),
    _switch("--o1", "Operators fused by rules.", compiled=True, commands=_ONLY_COMPILE),
    _switch("--o3", "Sections as large as the device allows; the default.", commands=_ONLY_COMPILE),
    _flag("--arch", "The device to compile for.", "sn30", str.lower, choices=_choices("arch"), compiled=True,
          commands=_ONLY_COMPILE),
    _switch("--enable-stoc-rounding --enable-stochastic-rounding", compiled=True, commands=_ONLY_COMPILE,
            meaning="With --dtype bf16: optimizer steps round stochastically."),
    _flag("--gradient-groups", default="section", choices=_choices("gradient_groups"), compiled=True,
          meaning="What one gradient group holds: the gradients of a backward section, or of one parameter.",
          commands=_ONLY_COMPILE),
    _count("--num-spatial-batches", "Batches side by side.", 1, inert=_ONE_BY_ONE),
    _count("--n-chips", "Chips of one replica, for --tensor-parallel.", 1, compiled=True),
    _flag("--num-tiles", "Tiles of the device that one replica has; -1 is all of them.", -1, int, placeholder="N",
          compiled=True, commands=_ONLY_COMPILE),
    _flag("--tensor-parallel", "What is split over the chips of a replica. A run has that of the PEF.", "none",
          choices=("none", *TENSOR_PARALLEL), compiled=True),
    _flag("--optim-level", "Effort of the vendor's compiler.", placeholder="LEVEL", inert=_OWN_PLACEMENT),
    _file("--compiler-configs-file", "Settings of the vendor's compiler.", inert=_OWN_PLACEMENT),
    _file("--mac-human-decision", "A placement by hand.", inert=_OWN_PLACEMENT),
    _flag("--resources-scaling-factors", "Factors on estimates of resources.", None, float, count="+",
          placeholder="FACTOR", inert=_OWN_PLACEMENT),
    _switch("--mac-v1", "The vendor's older placement.", inert=_OWN_PLACEMENT),
    _switch("--mac-v2", "The vendor's newer placement.", inert=_OWN_PLACEMENT),
    _switch("--weight-sharing", "Batches side by side share weights.", inert=_ONE_BY_ONE),
    _switch("--enable-conv-tiling", "Split images of convolutions into tiles.", inert=_NO_TILING),
    _switch("--enable-tiling", "Split tensors into tiles.", inert=_NO_TILING),
    _switch("--disable-retry-lower-visible-resources", inert=_OWN_PLACEMENT,
            meaning="Fail if a section does not fit, instead of trying with fewer units."),
    _flag("--io-memory-location", "The memory of inputs and outputs.", placeholder="MEMORY",
          inert="each run copies inputs and outputs between host and device memory"),
    _file("--resource-report-path", "The vendor's report of resources.",
          inert="sambasim report --tables shows the units of each section"),
    _switch("--verbose-report", "A longer report of resources.", inert="sambasim inspect shows everything"),
    # with a PEF
    _file("--pef -p", "The PEF: a path, or a name, found as out/NAME/NAME.pef.", required=WITH_PEF),
    _switch("--reduce-on-rdu", "Sync gradients between devices, not through the host.", commands=WITH_PEF),
    _count("--threads", "Threads of each rank; by default its share of the cores.", commands=WITH_PEF),
    _switch("--use-sambaloader", "Load data by the vendor's loader.",
            inert="data comes from the DataLoader or SambaLoader that the app makes"),
    _count("--num-iterations -n", "Steps to measure; on run and test for the app to read.", 100, commands=WITH_PEF),
    _file("--acc-report-json", "The file of the AccuracyReport that the app saves.", commands=WITH_PEF),
    _flag("--min-throughput", default=0.0, convert=_not_negative, placeholder="SAMPLES", commands=WITH_PEF,
          meaning="measure-performance fails below this many samples/s; on run and test for the app to read."),
    # measure
    _flag("--min-duration", "Measure for at least so many seconds.", 0.0,
          partial(_not_negative, what="a number of seconds"), placeholder="SECONDS", commands=MEASURING),
    _switch("--run-graph-only", "Measure the sections alone, without copies of inputs and outputs.",
            commands=MEASURING),
    _file("--json", "Write the results as JSON to FILE, or print them.", count="?", bare="-", commands=MEASURING),
    _file("--bench-report-json", "Write the results as JSON to this file.", commands=MEASURING),
    _file("--compiled-stats-json", "Write the content of the PEF as JSON to this file.", commands=MEASURING),
    _file("--json-counters", "Write the counters of the device to this file.", inert=_NO_DEVICE, commands=MEASURING),
    _count("--num-sections", "Sections to measure.", inert="all sections are measured", commands=MEASURING),
)  # fmt: skip
"""All flags, in the order of the help."""
