"""DP01, DP02, AP02: the command line compared with the compile, and with what the app passes to the session; AP04:
calls of library functions with arguments that they do not have."""

import difflib
import functools
import inspect
import shlex
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ParamSpec, TypeVar

from sambasim.compiler.capture.trial import is_tracing
from sambasim.errors import DataParallelError, LaunchError
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.runtime.machine.launcher import check_world_size
from sambasim.runtime.run.stepwise import Mode
from sambasim.samba.checks.findings import Finding, KeywordError, app_line, reporter
from sambasim.samba.notices import say_once
from sambasim.units import counted

_OF_THE_GRAPH = ("batch_size", "inference")
_AGREEING = (*_OF_THE_GRAPH, "grad_accumulation_steps")
"""Flags of the library that must be the same at the compile and in a run, and those of them that change the graph.
`trace_graph` itself refuses another --dtype."""

_PASSED_ON: Mapping[str, object] = {
    "data_parallel": False, "world_size": 1, "o0": False, "o1": False, "inference": False,
    "dtype": None, "enable_stoc_rounding": False, "n_chips": 1, "tensor_parallel": "none",
}  # fmt: skip
"""Flags that the app must pass to session.compile, with their defaults."""

_SESSION_RUN = "session.run(…, data_parallel=args.data_parallel, reduce_on_rdu=args.reduce_on_rdu)"


def note_not_passed_on(typed: Namespace | None, config: Mapping[str, object], *, inference: bool) -> None:
    """Report flags of the command line that are missing in `config`, the config_dict of session.compile (DP02)."""
    if typed is None or typed.command != "compile":
        return
    given = {**config, "inference": inference}
    missing = [
        name
        for name, default in _PASSED_ON.items()
        if getattr(typed, name, None) not in (None, default) and given.get(name, default) == default
    ]
    if missing:
        what = f"{', '.join(map(_flag, missing))} is on the command line, but not passed to session.compile"
        reporter.report(Finding("DP02", what, app_line(), "session.compile(…, config_dict=vars(args))"))


def note_changed(typed: Namespace | None, metadata: Mapping[str, str], batch_size: int) -> None:
    """Report flags of the library that differ from the compile (AP02). `batch_size` is that of the PEF."""
    for name, before, now in changed(typed, metadata):
        # An app may compile with batches of another size than -b; a run without -b then has the size of the PEF.
        if name in _AGREEING and (name, now) != ("batch_size", str(batch_size)):
            what = f"{_flag(name)} was {before} when the PEF was compiled, and is {now} now"
            reporter.report(
                Finding("AP02", what, app_line(), f"use the {_flag(name)} of the compile, or compile again")
            )


def changed(typed: Namespace | None, metadata: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields name, value at the compile and value now of each argument that differs: of the app's, and of the library's
    that must agree. Skips arguments that only one side has. metadata: the `pef_metadata` of the compile"""
    from sambasim.samba.utils.flags import FLAGS, MEASURING  # its package imports the session, which imports this

    if typed is None:
        return
    free = {"command", *(flag.destination for flag in FLAGS)}.difference(_AGREEING)
    if typed.command in MEASURING:  # there, --inference selects what is measured
        free |= {"inference"}
    for name, value in sorted(vars(typed).items()):
        before = metadata.get(name)
        predicts = name == "inference" and value is True  # a training PEF predicts too
        if before is not None and before != str(value) and name not in free and value is not None and not predicts:
            yield name, before, str(value)


def likely_cause(typed: Namespace | None, metadata: Mapping[str, str]) -> str:
    """The arguments that changed since the compile, to append to an error about a different graph; or ""."""
    likely = [one for one in changed(typed, metadata) if one[0] in _OF_THE_GRAPH or one[0] not in _AGREEING]
    causes = [f"{_flag(name)} was {before} at the compile, and is {now} now" for name, before, now in likely]
    return f" (AP02: {'; '.join(causes)})" if causes else ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def mode_of(
    program: Program,
    world_size: int,
    typed: Namespace | None,
    command: Sequence[str],
    *,
    data_parallel: bool,
    reduce_on_rdu: bool,
) -> Mode:
    """How an optimizer step is synced.

    typed: the parsed command line; None if the app did not parse one
    command: the command line without mpirun, for remedies
    data_parallel, reduce_on_rdu: the arguments of session.run

    Reports DP01 if replicas that could sync do not: each trains alone, as on an RDU. Raises LaunchError for several
    replicas that cannot sync.
    """
    parallel = program.data_parallel
    if world_size == 1 and not (data_parallel and parallel):
        return Mode.ALONE
    if not data_parallel and (parallel or getattr(typed, "data_parallel", False)):
        check_world_size(world_size, program.world_size, command=command, data_parallel=parallel)
        missing, remedy = "session.run has no data_parallel=", _SESSION_RUN
        if getattr(typed, "data_parallel", None) is False:
            missing = "--data-parallel is not on the command line"
            remedy = f"mpirun -np {world_size} {shlex.join([*command, '--data-parallel'])}"
        what = f"{world_size} replicas train independently: the PEF is data parallel, but {missing}"
        reporter.report(Finding("DP01", what, app_line(), remedy))
        if not reporter.on_demand:
            return Mode.ALONE
        data_parallel = True  # a check continues as if the app were right
    if not data_parallel:
        raise LaunchError(
            f"{world_size} replicas were started, but neither the app nor its PEF is data parallel",
            where=app_line(),
            remedy="compile and run it with --data-parallel, or without mpirun",
        )
    check_world_size(world_size, program.world_size, command=command, data_parallel=parallel)
    if world_size == 1:
        return Mode.ALONE
    if getattr(typed, "reduce_on_rdu", False) and not reduce_on_rdu and not reporter.has("DP01"):
        what = "--reduce-on-rdu is on the command line, but not passed to session.run: gradients go through the host"
        reporter.report(Finding("DP02", what, app_line(), "session.run(…, reduce_on_rdu=args.reduce_on_rdu)"))
    return Mode.DEVICE if reduce_on_rdu else Mode.HOST


_SYNCS = {
    Mode.ALONE: "trains without the others",
    Mode.HOST: "syncs through the host",
    Mode.DEVICE: "syncs on the device",
}


def check_agreement(modes: Sequence[Mode], where: str | None) -> None:
    """Raises DataParallelError (DP01) if replicas sync in different ways: some would wait for others forever."""
    rank = next((rank for rank, mode in enumerate(modes) if mode is not modes[0]), None)
    if rank is not None:
        what = f"DP01: replica 0 {_SYNCS[modes[0]]}, and replica {rank} {_SYNCS[modes[rank]]}"
        raise DataParallelError(what, where=where, remedy=f"{_SESSION_RUN} on every rank")


class Accumulation:
    """Compares the backwards of the first optimizer step with --grad-accumulation-steps (DP02)."""

    def __init__(self, typed: Namespace | None) -> None:
        self._wanted = int(getattr(typed, "grad_accumulation_steps", None) or 1)
        self._backwards = 0

    def note(self, kinds: Collection[SectionKind]) -> None:
        """Sections of `kinds` are about to run."""
        if self._wanted == 1:
            return
        self._backwards += SectionKind.BCKWD in kinds
        if SectionKind.OPT in kinds:
            if self._backwards != self._wanted:
                made = counted(self._backwards, "backward")
                what = f"--grad-accumulation-steps is {self._wanted}, but the optimizer step follows {made}"
                remedy = 'section_types=["FWD", "BCKWD"] for each batch, then ["OPT"] once'
                reporter.report(Finding("DP02", what, app_line(), remedy))
            self._wanted = 1


OTHER_WORDS = {"learning_rate": "lr", "epsilon": "eps", "beta1": "betas", "beta2": "betas"}
"""Names in other libraries, and the keyword of torch's optimizers for each."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def checks_keywords(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """A decorator that ignores unknown keywords, with a notice.

    The decorated function raises KeywordError for a misspelled keyword and for wrong positional arguments.
    """
    owner, dot, name = function.__qualname__.rpartition(".")
    # `session.run` for `Session.run`: apps use an instance.
    return checks_keywords_of(f"{owner.lower()}{dot}{name}", ())(function)


def checks_keywords_of(
    called: str, passed_on: Collection[str], *, refused_later: Collection[str] = ()
) -> Callable[[Callable[Arguments, Answer]], Callable[Arguments, Answer]]:
    """As `checks_keywords`, under the name `called`, with further keywords that are `passed_on` to torch.

    refused_later: known keywords that no remedy proposes, because a PEF cannot contain what they ask for
    """

    def decorate(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
        parameters = inspect.signature(function).parameters.values()
        named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        known = [name for name in dict.fromkeys((*named, *passed_on)) if name not in ("self", "cls")]
        offered = [name for name in known if name not in refused_later]
        fast = frozenset(known)

        @functools.wraps(function)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            if not fast.issuperset(kwargs):
                _drop_unknown(called, kwargs, known, offered)
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                    raise  # from inside the function
                raise KeywordError(
                    f"AP04: {called} got wrong arguments: {error}",
                    where=app_line(),
                    remedy=f"its arguments are {', '.join(offered)}" if offered else "it takes no arguments",
                ) from None

        return checked

    return decorate


def _drop_unknown(called: str, keywords: dict[str, object], known: Collection[str], offered: Collection[str]) -> None:
    for name in [name for name in keywords if name not in known]:
        del keywords[name]
        if is_tracing():  # a traced forward can neither compare words nor print
            continue
        if _nearly(name, known):
            near = _nearly(name, offered)
            remedy = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(offered)}"
            raise KeywordError(f"AP04: {called} takes no {name}", where=app_line(), remedy=remedy)
        say_once(f"{called}({name}=…)", "sambasim does not know this keyword", app_line())


def nearest(name: str, known: Collection[str], form: str = "{}") -> str:
    """A remedy for a wrong `name`: the nearest of the `known` names, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {form.format(near[0])}?" if near else f"it takes {', '.join(known)}"


def _nearly(name: str, known: Collection[str]) -> list[str]:
    """Those of `known` that `name` misspells, or extends, as `optimizer` extends `optim`."""
    if OTHER_WORDS.get(name) in known:
        return [OTHER_WORDS[name]]
    longer = [short for short in known if len(short) > 1 and name.startswith(short) and name[len(short) :].isalpha()]
    return longer or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
