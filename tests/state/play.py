"""Gives the verdict on a case: compiles and runs it in a forked child, and holds it against an eager loop in another,
so that nothing that a case does to its process reaches the next one."""

import faulthandler
import gc
import itertools
import os
import pickle
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import sambasim as ss
from sambasim.errors import InternalError, SambasimError
from sambasim.forks import Fork
from sambasim.pef.archive import bytes_of
from tests.state.case import BATCH, Build, Case, Setup, Verdict, eager, net_of
from tests.support.whole import is_whole

TIMEOUT_S = 60
_PACKAGE = str(Path(ss.__path__[0]))
_FEW = 6  # losses that a message shows


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a case. `detail`: what differs, or the traceback. `what`, `where`, `remedy`: of the error."""

    verdict: Verdict
    detail: str = ""
    what: str = ""
    where: str = ""
    remedy: str = ""
    notices: tuple[str, ...] = ()

    def __str__(self) -> str:
        error = f"\n{self.what}\nwhere: {self.where}\ntry: {self.remedy}" if self.what else ""
        return f"{self.verdict}: {self.detail}{error}" + "".join(f"\nnotice: {one}" for one in self.notices)


def play(case: Case) -> Found:
    """The verdict on a case alone, not on its rewrite."""
    warm()
    expected = _in_eager(case.oracle or case.build, case.steps)
    found = in_child(lambda: _judged(case, *expected))
    return found if isinstance(found, Found) else Found("crashed", str(found))


def complaints(case: Case, found: Found) -> Iterator[str]:
    """What is wrong with the verdict, with the error, and with the rewrite."""
    if found.verdict not in case.expected:
        yield f"it is {found.verdict}, not {' or '.join(sorted(case.expected))}"
        return
    if found.verdict != "refused":
        return
    oracle = case.oracle or case.build
    place = found.where or found.what  # an error of several reasons lists its lines
    if case.where is not None and case.where not in place:
        yield f"the error does not point at the line with {case.where!r}"
    if found.where.startswith((_PACKAGE, os.path.relpath(_PACKAGE))) or "/site-packages/" in found.where:
        yield "the error points at a line that is not the user's"
    text = f"{found.what}\n{found.remedy}"
    yield from (f"the error does not say {one!r}" for one in case.says if one not in text)
    yield from (f"the error says {one!r}" for one in case.never_says if one in text)
    if case.rewritten is not None and is_whole():
        of_rewrite = replace(case, build=case.rewritten, rewritten=None, expected=frozenset({"equal", "told"}))
        if not case.own_losses:
            of_rewrite = replace(of_rewrite, oracle=oracle)
        again = play(of_rewrite)
        if again.verdict not in of_rewrite.expected:
            yield f"the rewrite that the remedy proposes is {again}"
    elif case.rewritten is not None and not case.own_losses:
        losses = [_in_eager(build, case.steps)[0] for build in (oracle, case.rewritten)]
        if not all(_close(one, other, case.tolerance) for one, other in zip(*losses, strict=True)):
            yield f"the rewrite that the remedy proposes has the losses {losses[1]}, eager {losses[0]}"


def in_child(function: Callable[[], Any]) -> Any:
    """What `function` returns in a forked child; a text if it raises, ends the process or takes too long."""
    with tempfile.TemporaryFile("w+") as said:

        def answer(request: object) -> Any:
            faulthandler.enable(said)
            faulthandler.dump_traceback_later(TIMEOUT_S, exit=True, file=said)
            torch.set_num_threads(1)
            random.seed(0)
            np.random.seed(0)
            try:
                return function()
            except BaseException:
                return traceback.format_exc()[-2000:]

        with closing(Fork(answer, lambda: None)) as fork:
            answered = fork.ask()
        said.seek(0)
        return answered if answered is not None else f"no answer: {said.read()[:2000] or 'it ended, or was killed'}"


def _in_eager(build: Build, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    found = in_child(lambda: eager(build(), steps))
    assert isinstance(found, tuple), f"it does not run in eager PyTorch: {found}"
    return found


@cache
def warm() -> None:
    """Makes the imports and caches of first compiles, before the first fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):  # the second compile of a process makes caches for its children
            setup = net_of(lambda net, h: h)
            ss.run(_compiled(setup, Path(folder)), setup.data, steps=1, threads=1, quiet=True)
    gc.collect()
    gc.freeze()  # so that neither a collection nor a search for referrers visits what all children have
    torch.set_num_threads(threads)


def _compiled(setup: Setup, folder: Path) -> ss.Pef:
    example = tuple(tensor[:BATCH] for tensor in setup.data)
    in_order = {"set": {"data.shuffle": False}, "output_folder": folder, "quiet": True, **setup.options}
    return ss.compile(setup.model, example, name="case", loss=setup.loss, optimizer=setup.optimizer, **in_order)


def _judged(case: Case, losses: list[float], state: Mapping[str, Tensor]) -> Found:
    """The verdict, in a process of its own; `losses` and `state` are those of the eager loop."""
    setup = case.build()
    before, old, pef, found = process_state(), len(fakes()), None, Found("equal")
    with tempfile.TemporaryDirectory() as name:
        try:
            for _ in range(case.compiles):
                pef = _compiled(setup, Path(name))
        except Exception as error:
            found = _of_error(error, "refused")
        damage = [*_changed(before), *(f"a {type(one).__name__} stays" for one in fakes()[old:])]
        if pef is not None and not found.what and not found.detail:
            found = _of_run(case, setup, pef, losses, state)
            damage += _changed(before)
    try:
        again = eager(setup, case.steps)[0] if case.oracle is None else losses
        if not all(map(_close, again, losses, itertools.repeat(0.0))):
            damage.append(f"the model is not as it was: {again[:_FEW]}, before {losses[:_FEW]}")
    except Exception as error:
        damage.append(f"the model cannot be called any more: {type(error).__name__}: {str(error)[:300]}")
    if damage and found.verdict in ("equal", "told", "refused"):
        return replace(found, verdict="damaged", detail="; ".join([found.verdict, *dict.fromkeys(damage)]))
    return found


def _of_error(error: Exception, verdict: Verdict) -> Found:
    if not isinstance(error, SambasimError) or isinstance(error, InternalError):
        return Found("traceback", "".join(traceback.format_exception(error))[-3000:])
    return Found(verdict, "", error.what, error.where or "", error.remedy or "")


def _of_run(case: Case, setup: Setup, pef: ss.Pef, losses: list[float], state: Mapping[str, Tensor]) -> Found:
    try:
        run = ss.run(pef, setup.data, steps=case.steps, threads=1, quiet=True)
        wrong = list(_differences(case, run, losses, state))
        if case.also is not None and (complaint := case.also(case.build(), state, pef, run)):
            wrong.append(complaint)
    except Exception as error:
        return _of_error(error, "ended")
    is_told = bool(case.notice) and any(case.notice in notice for notice in pef.notices)
    verdict: Verdict = "told" if is_told else "other" if wrong else "equal"
    return Found(verdict, "; ".join(wrong), notices=pef.notices)


def _differences(case: Case, run: ss.Run, losses: list[float], state: Mapping[str, Tensor]) -> Iterator[str]:
    if not all(_close(one, other, case.tolerance) for one, other in zip(run.losses, losses, strict=True)):
        off = max(abs(one - other) for one, other in zip(run.losses, losses, strict=True))
        yield f"losses differ by {off:.1e}: {run.losses[:_FEW]}, eager {losses[:_FEW]}"
    if case.oracle is None and run.weights.keys() != state.keys():
        yield f"the weights have {sorted(run.weights)}, eager {sorted(state)}"
    for name in run.weights.keys() & state.keys():
        one, other = run.weights[name], state[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            yield f"{name} is {one.dtype}{list(one.shape)}, eager {other.dtype}{list(other.shape)}"
        elif bytes_of(one) != bytes_of(other) and not (
            case.tolerance and torch.allclose(one, other, case.tolerance, 1e-5)
        ):
            yield f"{name} differs by {(one.double() - other.double()).abs().max().item():.1e}"


def _close(one: float, other: float, tolerance: float) -> bool:
    return one == other or abs(one - other) <= tolerance * abs(other) or (one != one and other != other)


def process_state() -> dict[str, object]:
    """What a compile has to leave as it is, by its name."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "deterministic mode": torch.get_deterministic_debug_mode(),
        "number of threads": torch.get_num_threads(),
        "generator of torch": torch.get_rng_state().numpy().tobytes(),
        "generator of Python": random.getstate(),
        "generator of NumPy": pickle.dumps(np.random.get_state()),
        "warnings filters": list(warnings.filters),
        "modes": (len(_get_current_dispatch_mode_stack()), torch._C._len_torch_function_stack()),
        "profile and trace": (sys.getprofile(), sys.gettrace()),
        "working directory": os.getcwd(),
        "nn.Module": dict(vars(nn.Module)),
    }


def _changed(before: Mapping[str, object]) -> list[str]:
    now = process_state()
    return [f"compile changed the {name}" for name in before if before[name] != now[name]]


def fakes() -> list[object]:
    """The FakeTensors that are alive."""
    return [one for one in gc.get_objects() if issubclass(type(one), FakeTensor)]
