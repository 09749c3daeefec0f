"""What `sambasim plan` plans: a config, a model or a PEF, as options and the programs of its strategies."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sambasim.cli import shared
from sambasim.cli.terminal import phases

if TYPE_CHECKING:
    from sambasim.commands.variants import OfDtypes, Variants
    from sambasim.ir.program import Program
    from sambasim.options.compile import CompileOptions


def subject_of(
    subject: str, overrides: Sequence[str], output_folder: Path, arch: str | None
) -> "tuple[CompileOptions, Program | None]":
    """The options of SUBJECT for `arch`, and the program if it is a PEF. Raises OptionError."""
    from sambasim.cli.prediction import is_model, refuse_script
    from sambasim.options.compile import compile_options

    if is_model(subject):
        config, target = (Path(subject), None) if subject.endswith(".toml") else (None, subject)
        options, program = compile_options(config, target, overrides, {}), None
    else:
        refuse_script(subject)
        options, program = _pef(subject, overrides, output_folder)
    return options.model_copy(update={"arch": arch or options.arch}), program


def _pef(subject: str, overrides: Sequence[str], output_folder: Path) -> "tuple[CompileOptions, Program]":
    from sambasim.errors import OptionError
    from sambasim.options.compile import BuildOptions, ParallelOptions, options_in_python
    from sambasim.pef import locate, read

    if overrides:
        raise OptionError(f"--set changes a config, and {subject} is a PEF", remedy=f"sambasim plan {subject}")
    document = read(locate(subject, output_folder))
    program, compiled = document.program, document.compile_options
    if program.ranks_of_replica > 1:
        raise OptionError(
            f"a replica of {program.name} has {program.ranks_of_replica} ranks already, and a plan begins with one",
            remedy="plan the config or the model that it was compiled from",
        )
    if compiled.get("recompute") != "none":
        raise OptionError(f"{program.name} recomputes activations", remedy="plan the config or the model")
    tables: dict[str, object] = {"data": document.data_source, "model": compiled.get("model")}
    tables |= {name: value for name, value in document.training_defaults.items() if value is not None}
    for table, kind in (("compile", BuildOptions), ("parallel", ParallelOptions)):
        tables[table] = {name: compiled[name] for name in kind.model_fields if name in compiled}
    return options_in_python(tables, {}), program


def check_subject(
    options: "CompileOptions", only: Mapping[str, Sequence[object]], *, emitted: bool, of_pef: bool
) -> None:
    """Raises OptionError for what cannot be planned, or, if it is to be `emitted`, for what no config can say."""
    from typing import get_args

    from sambasim.errors import OptionError
    from sambasim.options.compile import BuildOptions

    if options.inference:
        raise OptionError("a plan is for training, and this is for inference", remedy="leave out inference")
    if of_pef and (others := [one for one in only.get("dtype", ()) if one != options.dtype]):
        raise OptionError(
            f"--only dtype={others[0]}: the PEF is {options.dtype}",
            remedy=f"--only dtype={options.dtype}, or plan the config or the model",
        )
    known = get_args(BuildOptions.model_fields["arch"].annotation)
    if emitted and options.arch not in known:
        what = f"--emit writes a config, and a config compiles for {', '.join(known)}, not {options.arch}"
        raise OptionError(what, remedy="leave out --emit, or give one of them as --arch")
    if emitted and options.model.target is None:
        what = "--emit writes a config, and this PEF was compiled in Python or by an app: it names no model"
        raise OptionError(what, remedy="leave out --emit")


def programs_of(
    options: "CompileOptions", program: "Program | None", only: Mapping[str, Sequence[object]], *, quiet: bool
) -> "OfDtypes":
    """The programs of all strategies, from `program`, or else from one capture for each dtype. The first is made
    now: its errors end the command."""
    with shared.kept_imports():
        from sambasim.commands.variants import OfDtypes, Variants

    def capture(dtype: str) -> Variants:
        if program is not None:
            return Variants(program, options)
        with phases(quiet=quiet) as report:
            return captured(options, {"dtype": dtype}, report)

    programs = OfDtypes(capture)
    programs.of(str(next(iter(only.get("dtype", ())), options.dtype)))
    return programs


def captured(options: "CompileOptions", changes: Mapping[str, object], report: Callable[[str], None]) -> "Variants":
    """A capture of the model with `changes` of `options`, before any strategy."""
    with shared.kept_imports():
        from sambasim.commands.variants import Variants
        from sambasim.compiler.front import captured_from_options

    plain = {"n_chips": 1, "micro_batches": 1, "tensor_parallel": None}
    chosen = options.model_copy(update={**plain, **changes})
    program, model = captured_from_options(chosen, report)
    return Variants(program, chosen, model)
