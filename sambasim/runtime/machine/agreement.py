"""What all ranks of a job must have in common, compared before anything else: else hosts with another version of
sambasim, or other files, would wait for each other in vain, or train with other bits in silence.

Ranks exchange JSON texts, which every version of sambasim can read.
"""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from sambasim import __version__
from sambasim.errors import LaunchError, SambasimError
from sambasim.runtime.machine.communicator import Communicator

DATA = "data set"
_SAMBASIM, _THREADS = "sambasim", "threads"
_COPY = "copy the same file to every host, or keep it in a folder that all hosts share"
_REMEDIES = {
    _SAMBASIM: "install the same sambasim on every host, or keep it in a folder that all hosts share",
    "Python": "start the same Python on every host: mpirun -np N /PATH/TO/python -m sambasim …",
    "torch": "on {host}: python -m pip install torch=={first}",
    "MPI": "use one version of the MPI library on every host, that of the mpirun",
    _THREADS: "--threads N gives as many to every rank; or set OMP_NUM_THREADS alike on every host",
    "PEF": _COPY,
    "--weights": _COPY,
    "--deepspeed": _COPY,
    "--cluster": _COPY,
    DATA: "give every rank the same whole data set: sambasim distributes the samples itself",
}
_START_ALIKE = "start all ranks with the same flags"


def check_job(communicator: Communicator, threads: int | None, flags: Mapping[str, object] | None = None) -> None:
    """Collective. Raises LaunchError unless ranks have the same versions, number of threads and `flags`. `threads`:
    those that were asked for by a flag."""
    if communicator.world_size > 1:
        compares_code = communicator.local_rank == 0 and communicator.node_count > 1
        by_environ = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}"
        versions = {
            _SAMBASIM: f"{__version__} (code {_code_sha256()[:8]})" if compares_code else None,
            "Python": platform.python_version(),
            "torch": metadata.version("torch"),
            "MPI": communicator.library,
        }
        check_equal(
            communicator,
            {**versions, _THREADS: by_environ if threads is None else f"--threads {threads}", **(flags or {})},
        )


def check_equal(
    communicator: Communicator, *facts: Mapping[str, object], kind: type[SambasimError] = LaunchError
) -> None:
    """Collective. Raises an error of `kind` unless all ranks give equal facts under each name; those of None do not
    count. `facts`: of each rank that this process runs."""
    if communicator.world_size > 1 or len(facts) > 1:
        texts = [{name: str(value) for name, value in own.items() if value is not None} for own in facts]
        check_answers(communicator.all_gather_object(json.dumps([communicator.host_name, texts])), kind)


def check_answers(answers: Sequence[str], kind: type[SambasimError] = LaunchError) -> None:
    """Raises an error of `kind` for the first name under which ranks have told different things. An answer is the JSON
    text of a process: its host, and for each of its ranks texts by name. That of an older version is anything else."""
    told: dict[str, tuple[str, str]] = {}
    rank = 0
    for answer in answers:
        host, of_ranks = _read(answer)
        for facts in of_ranks:
            where = f"rank {rank} on {host}"
            rank += 1
            for name, text in facts.items():
                first, who = told.setdefault(name, (text, where))
                if text != first:
                    remedy = _REMEDIES.get(name, _START_ALIKE).format(host=host, first=first.partition("+")[0])
                    raise kind(f"{name}: {first} for {who}, but {text} for {where}", remedy=remedy)


def _read(answer: object) -> tuple[str, list[Mapping[str, str]]]:
    try:
        host, of_ranks = json.loads(str(answer))
        return host, [{str(name): str(text) for name, text in facts.items()} for facts in of_ranks]
    except (ValueError, TypeError, AttributeError):
        return "another host", [{_SAMBASIM: "an older version"}]


def _code_sha256() -> str:
    """Of the source files of sambasim: a version has many states between releases."""
    sha256, package = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".c")):
        sha256.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return sha256.hexdigest()
