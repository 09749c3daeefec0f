"""The figures of `make bench`: a training step, its parts and its memory, gradient sync, and how long a user waits.

Candidates take turns, round after round, each in processes of its own: the runtime makes the C library keep freed
memory, and a peer in the same process would gain from that too. Each function has a folder of its own.
"""

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from sambasim.ir.schedule import bubble, make
from sambasim.options.compile import CompileOptions
from sambasim.options.training import DataOptions, ModelOptions, OptimizerOptions, TrainingOptions
from sambasim.records.metrics import CollectivesRecord
from sambasim.units import KIB, MIB, format_bytes
from tests.benchmarks import workloads
from tests.benchmarks.measure import Action, Figure, cpu_s, in_turns, run_body, timed
from tests.benchmarks.planning import plan
from tests.benchmarks.reading import lengths, reading
from tests.benchmarks.workloads import GPT2_PADDED, PIPELINED_MICRO_BATCHES, WORKLOADS, ParallelWay, Way, Workload
from tests.cli.typed import each
from tests.mpi.training import EACH_ALONE
from tests.support.compiled import compile_from_options
from tests.support.installation import THIS, TIMEOUT_S
from tests.support.mpi import ROOT, mpirun

REPLICAS, MEMORY_REPLICAS = 2, 4
GPT2_PADDED_PARAMETERS = 124_475_904
STEP_ROUNDS, OVERHEAD_ROUNDS, SCHEDULE_ROUNDS = 4, 5, 3
STEP_GOALS = {"gpt": {1: 1.01, 2: 1 / 1.4}, "mlp": {1: 1.01, 2: 1 / 4}, "logistic_regression": {1: 0.3, 2: 1 / 8}}
COMPILED_GOAL = 1 / 1.25
HOST_ROUNDS, HOST_STEPS = 5, 10
LINKS = {
    "direct": ("", 0.95),
    "1 Gbit/s": ("tbf rate 1gbit burst 64kb latency 400ms", 0.75),
    "RTT 10 ms": ("netem limit 10000 delay 5ms", 0.95),
    "RTT 2 ms, 1 % loss": ("netem limit 10000 delay 1ms loss 1%", 0.95),
}
"""Between hosts: what `tc qdisc add` gives each end, and the ratio that is the goal."""

OVERHEAD_STEPS, CHECKPOINT_EVERY = 40, 10
PROMISED_EVERY = 50
"""The promise is for a checkpoint every 50 steps. More of them are measured, and each counts as one in 50."""

_COPY = "copying as many bytes"
_NONE = "none: what an MPI saves by one buffer"
_SIZES_BYTES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
SYNC_GOALS = (
    (64 * KIB, "mpi", "ratio at most 1"),
    (64 * KIB, "mpi-in-place", _NONE),
    *((size_bytes, "gloo", "ratio at most 0.1") for size_bytes in _SIZES_BYTES),
    *((size_bytes, "mpi", "ratio at most 0.2") for size_bytes in _SIZES_BYTES),
    *((size_bytes, "mpi-in-place", _NONE) for size_bytes in _SIZES_BYTES),
    *((size_bytes, _COPY, "ratio at most 1.1") for size_bytes in (16 * MIB, 64 * MIB)),
)
"""Size, peer of device sync, and goal."""

LARGE_MODELS = {
    "GPT2LMHeadModel": '{input_ids = "int64[128] < 50257", labels = "int64[128] < 50257"}',
    "BertForMaskedLM": '{input_ids = "int64[128] < 30522", labels = "int64[128] < 30522"}',
    "ResNetForImageClassification": '{pixel_values = "float32[3, 224, 224]", labels = "int64[] < 2"}',
}
"""Of transformers, with their own configs, which are those of GPT-2 small, BERT base and ResNet-50: their inputs."""

_PLAIN_SCRIPT = """
import torch
from torch import nn

model = nn.Linear(784, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
image, label = torch.randn(32, 784), torch.randint(10, (32,))
optimizer.zero_grad()
torch.autograd.backward(nn.functional.cross_entropy(model(image), label))
optimizer.step()
"""


def compile_workload(workload: Workload, folder: Path, *, parts: int = 1, **parallelism: Any) -> Path:
    """Write `folder/NAME/NAME.pef`, and return its path. `parts`: of a batch, each of the size in `workload`."""
    where = workloads.__name__
    options = CompileOptions(
        model=ModelOptions(target=f"{where}:{workload.model.__name__}"),
        data=DataOptions(source=f"{where}:{workload.samples.__name__}"),
        optimizer=OptimizerOptions(name=workload.optimizer, lr=workload.learning_rate),
        training=TrainingOptions(batch_size=workload.batch_size * parts),
        pef_name=workload.name,
        output_folder=folder,
        **(parallelism or {"data_parallel": True, "world_size": REPLICAS}),
    )
    return compile_from_options(options).path


def pipeline(stages: int, micro_batches: int, **more: Any) -> dict[str, Any]:
    return {"pipeline_stages": stages, "micro_batches": micro_batches, "parts": micro_batches, **more}


def schedules(folder: Path) -> Iterator[Figure]:
    """The share of a step that rank 0 of a pipeline waits, against the idle share of its schedule for equal stages."""
    micro_batches, ours = PIPELINED_MICRO_BATCHES, ParallelWay.OURS
    for name in ("1f1b", "interleaved-1f1b", "zb-h1"):
        cut = pipeline(2, micro_batches, schedule=name)
        pef = compile_workload(workloads.EIGHT_LAYERS, folder / name, **cut)
        found = [run_body("parallel", ours, str(pef), "1", np=2) for _ in range(SCHEDULE_ROUNDS)]
        waited = statistics.median(run["waited_s"] / statistics.mean(run["steps_s"]) for run in found)
        shares = {"measured": waited, "schedule": bubble(make(name, 2, micro_batches))}
        yield Figure(f"idle share by {name}, np 2", "measured", "schedule", "difference at most 0.05", shares, unit="")


def parallel(folder: Path) -> Iterator[Figure]:
    """Two ranks of a replica, and ZeRO 3 on two replicas, against PyTorch's own on gloo."""
    micro_batches, ours = PIPELINED_MICRO_BATCHES, ParallelWay.OURS
    whole = compile_workload(workloads.SPLIT_GPT, folder / "whole", data_parallel=False)
    cuts: dict[ParallelWay, dict[str, Any]] = {
        ParallelWay.PIPELINING: pipeline(2, micro_batches),
        ParallelWay.DTENSOR: {"tensor_parallel": "weight", "n_chips": 2},
        ParallelWay.FSDP2: {"data_parallel": True, "world_size": 2, "zero": 3},
    }
    pefs = {peer: compile_workload(workloads.SPLIT_GPT, folder / peer.name, **cut) for peer, cut in cuts.items()}
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    waited: defaultdict[ParallelWay, list[float]] = defaultdict(list)
    by_gloo: defaultdict[ParallelWay, list[float]] = defaultdict(list)
    for _ in range(STEP_ROUNDS):
        seconds["one rank"] += run_body("parallel", ours, str(whole), str(micro_batches))["steps_s"]
        for peer, pef in pefs.items():
            measured = run_body("parallel", ours, str(pef), "1", np=2)
            seconds[f"{ours}, as {peer}"] += measured["steps_s"]
            waited[peer].append(measured["waited_s"])
            seconds[peer] += run_body("parallel", peer, "-", "1", np=2)["steps_s"]
            if peer is not ParallelWay.PIPELINING:
                by_gloo[peer] += run_body("parallel", ParallelWay.GLOO, str(pef), "1", np=2)["steps_s"]
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    pipelined = f"{ours}, as {ParallelWay.PIPELINING}"
    ideal = {"ideal": medians["one rank"] * (micro_batches + 1) / (2 * micro_batches), pipelined: medians[pipelined]}
    yield Figure("pipeline, 8 micro-batches, 1F1B, np 2", pipelined, "ideal", "ratio at most 1.10", ideal)
    for peer in pefs:
        yield Figure(f"step by {peer}, np 2", f"{ours}, as {peer}", peer, "ratio at most 1", medians)
    for peer, times_s in by_gloo.items():
        of_both = {ours: statistics.median(waited[peer]), "gloo": statistics.median(times_s)}
        yield Figure(f"communication as {peer}, np 2, in a step", ours, "gloo", "ratio at most 0.5", of_both)


def _steps_s(folder: Path, name: str, way: str, count: int, checkpoints_s: list[float], np: int = REPLICAS) -> Any:
    """And adds the seconds of checkpoints to `checkpoints_s`."""
    measured = run_body("steps", str(folder), name, way, str(count), str(CHECKPOINT_EVERY), np=np)
    checkpoints_s += measured["checkpoints_s"]
    return measured["steps_s"]


def steps(folder: Path) -> Iterator[Figure]:
    """Seconds of a step of one replica, against eager PyTorch; with sync between devices, against
    DistributedDataParallel on gloo."""
    for workload, np in product(WORKLOADS, (1, REPLICAS)):
        compile_workload(workload, folder / str(np), **({} if np > 1 else {"data_parallel": False}))
        given = folder / str(np), workload.name
        ways = {str(way): partial(_steps_s, *given, way, workload.steps, [], np) for way in workload.ways}
        medians = in_turns(ways, STEP_ROUNDS)
        for way, peer, goal in (
            (Way.PLAIN, Way.DDP, f"ratio at most {STEP_GOALS[workload.name][np]:.3f}"),
            (Way.ALONE, Way.DDP, "none: if sync and optimizer cost nothing"),
            (Way.INDUCTOR, Way.DDP_COMPILED, f"ratio at most {COMPILED_GOAL:.3f}" if np > 1 else "none"),
        ):
            if way in workload.ways:
                yield Figure(f"step of {workload.name}, np {np}", way, peer, goal, medians)


def bf16(folder: Path) -> Iterator[Figure]:
    """Seconds of a step in bfloat16 on one rank, against eager PyTorch with its fused optimizer."""
    workload, ways = WORKLOADS[0], dict[str, Action]()
    for name, masters, peer in (("bf16", False, Way.BFLOAT16), ("master weights", True, Way.AUTOCAST)):
        compile_workload(workload, folder / name, data_parallel=False, dtype="bf16", master_weights=masters)
        for way in (Way.PLAIN, Way.INDUCTOR, peer):
            measured = partial(_steps_s, folder / name, workload.name, way, workload.steps, [], 1)
            ways[way if way is peer else f"{way}, {name}"] = measured
    medians = in_turns(ways, STEP_ROUNDS)
    for name, peer in (("bf16", Way.BFLOAT16), ("master weights", Way.AUTOCAST)):
        plain = f"{Way.PLAIN}, {name}"
        yield Figure("step of gpt, np 1", plain, peer, "ratio at most 0.95", medians)
        yield Figure("step of gpt, np 1", f"{Way.INDUCTOR}, {name}", plain, "ratio at most 1", medians)


def hosts(folder: Path) -> Iterator[Figure]:
    """Seconds of a step on two hosts, which this machine plays, against DistributedDataParallel on gloo with the fused
    optimizer: for each way of sync, two sizes of a GPT, and several links. With gradients in bfloat16, against its own
    way to send them so."""
    peers = {Way.PLAIN: Way.DDP_FUSED, Way.HOST: Way.DDP_FUSED, Way.WIRE: Way.DDP_BF16}
    ways, gpts = dict.fromkeys((*peers, *peers.values())), (workloads.SMALL_GPT, WORKLOADS[0])
    for workload in gpts:
        compile_workload(workload, folder)
    for link, (qdisc, goal) in LINKS.items():
        try:
            _on_two_hosts(qdisc, "-c", "")
        except (OSError, RuntimeError) as error:
            needs = "root, util-linux, iproute2, MPICH, and this qdisc in the kernel"
            print(f"two hosts, {link}: not measured, needs {needs}: {str(error).strip()}", file=sys.stderr)
            continue
        for name in (workload.name for workload in gpts):
            actions = {str(way): partial(_median_step_s, qdisc, folder, name, way) for way in ways}
            medians = in_turns(actions, HOST_ROUNDS)
            for way, peer in peers.items():
                yield Figure(f"step of {name}, two hosts, {link}", way, peer, f"ratio at most {goal}", medians)


def _median_step_s(qdisc: str, folder: Path, name: str, way: str) -> Sequence[float]:
    body = ("-m", "tests.benchmarks.bodies.steps", str(folder), name, way, str(HOST_STEPS), "0")
    return [statistics.median(json.loads(_on_two_hosts(qdisc, *body).splitlines()[-1])["steps_s"])]


def _on_two_hosts(qdisc: str, *arguments: str) -> str:
    """What Python prints on rank 0, if there is one rank on each. Raises RuntimeError with its errors if it fails."""
    command = (str(ROOT / "tests" / "benchmarks" / "play_hosts"), qdisc, *THIS.argv(*arguments, np=2, program="python"))
    result = subprocess.run(
        command, cwd=ROOT, env=THIS.environ(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if result.returncode:
        raise RuntimeError(result.stderr or f"exit code {result.returncode}")
    return result.stdout


def memory(folder: Path) -> Iterator[Figure]:
    """GPT-2 small at four replicas with AdamW: the sum of the proportional set sizes of all ranks. Then the device
    memory of the rank with the most, against parameters, gradients and states of a whole model."""

    def measured(pef: str, path: str, env: Mapping[str, str]) -> Any:
        return run_body("memory", pef, path, "1", "1", np=MEMORY_REPLICAS, env=env)

    pef = compile_workload(workloads.GPT2_SMALL, folder)
    held = {"sambasim": measured(str(pef), "device", {}), "ddp": measured("ddp", "", {})}
    sizes = {way: float(found["held_bytes"]) for way, found in held.items()}
    yield Figure("memory, GPT-2 small, np 4", "sambasim", "ddp", "ratio at most 0.55", sizes, unit="bytes")
    cuts: dict[str, dict[str, Any]] = {
        "pipeline of 4": pipeline(4, 4),
        "tensor parallelism on 4": {"tensor_parallel": "weight", "n_chips": 4},
        "ZeRO 3 on 4 nodes": {"data_parallel": True, "world_size": 4, "zero": 3},
    }
    for name, cut in cuts.items():
        pef = compile_workload(GPT2_PADDED, folder, **cut)
        found = measured(str(pef), "host", EACH_ALONE if "zero" in cut else {})
        sizes = {"rank": float(found["device_bytes"]), "whole": 4.0 * GPT2_PADDED_PARAMETERS * 4}
        yield Figure(f"device memory, GPT-2 small, {name}", "rank", "whole", "ratio at most 0.40", sizes, unit="bytes")


def overhead(folder: Path) -> Iterator[Figure]:
    """What stall detection costs in a step, and what a checkpoint every PROMISED_EVERY steps costs."""
    checkpoints_s: list[float] = []
    compile_workload(WORKLOADS[0], folder)
    names = "bare", "watched", "checkpointed"
    ways = {way: partial(_steps_s, folder, "gpt", way, OVERHEAD_STEPS, checkpoints_s) for way in names}
    medians = in_turns(ways, OVERHEAD_ROUNDS)
    yield Figure("step of gpt, np 2", "watched", "bare", "ratio at most 1.01", medians)
    step_s = medians["watched"]
    shared = {"with": step_s + statistics.median(checkpoints_s) / PROMISED_EVERY, "without": step_s}
    title = f"step of gpt, np 2, and a checkpoint every {PROMISED_EVERY}"
    yield Figure(title, "with", "without", "ratio at most 1.03", shared)


def sync(folder: Path) -> Iterator[Figure]:
    """One run of `sambasim bench collectives` at np 2, against gloo, MPI and copying; and through the host."""
    asked = ("--min-bytes", "64KiB", "--max-bytes", "64MiB", "--paths", "device,host-mpi,mpi,mpi-in-place,gloo")
    printed = THIS.call("bench", "collectives", *asked, "--json", folder=folder, np=2)
    sizes = {size.size_bytes: size for size in CollectivesRecord.model_validate_json(printed).sizes}
    for size_bytes, peer, goal in SYNC_GOALS:
        size = sizes[size_bytes]
        times_s = {path.path: path.measured_s for path in size.paths} | {_COPY: size.copy_bound_s}
        medians = {name: times_s[name] for name in ("device", peer)}
        yield Figure(f"sync of {format_bytes(size_bytes)}", "device", peer, goal, medians)
    for size_bytes, size in sizes.items():
        medians = {path.path: path.measured_s for path in size.paths}
        yield Figure(f"sync of {format_bytes(size_bytes)}", "host-mpi", "device", "none", medians)


def compiling(folder: Path) -> Iterator[Figure]:
    """Large models, compared with eager PyTorch as `sambasim compile` does it, against the same without it."""
    for name, inputs in LARGE_MODELS.items():
        fields = ("optimizer.name=adamw", "data.source=synthetic", f"data.inputs={inputs}")
        command = ("compile", f"transformers:{name}", *each("--set", fields), "-b", "2")
        both = {"with": command, "without": (*command, "--check", "0")}
        ways = {way: _called(folder, *argv) for way, argv in both.items()}
        yield Figure(f"compiling {name}, its comparison", "with", "without", "none", in_turns(ways, 1))
        ways = {way: cpu_s(partial(THIS.call, *argv, folder=folder)) for way, argv in both.items()}
        goal = "at most 15 s with it" if name == "GPT2LMHeadModel" else "none"
        yield Figure(f"processor time of compiling {name}", "with", "without", goal, in_turns(ways, 1))


def _called(folder: Path, *command: str, check: bool = True) -> Action:
    return timed(lambda: THIS.call(*command, folder=folder, check=check))


def start(folder: Path) -> Iterator[Figure]:
    """Help and refusal against importing torch; the first step, and that it begins with GPT-2 small, against importing
    torch and MPI on two ranks; an app that loads its PEF and compares one step with PyTorch's, against a plain script
    that takes one step."""

    def python(body: str, *launcher: str) -> Action:
        argv = [*launcher, sys.executable, "-c", body]
        return timed(lambda: subprocess.run(argv, capture_output=True, timeout=TIMEOUT_S, check=False))

    importing = {"import torch": python("import torch")}
    for name, arguments in (("help", ["--help"]), ("a wrong flag", ["run", "--pfe", "x"])):
        subject = f"sambasim {' '.join(arguments)}"
        medians = in_turns({subject: _called(folder, *arguments, check=False), **importing}, 7, warm=True)
        yield Figure(name, subject, "import torch", "ratio below 0.2", medians)
    THIS.call("compile", "--data-parallel", "-ws", "2", folder=folder)
    subject, peer = "sambasim run", "import torch and MPI"
    both = python("import torch; from mpi4py import MPI", mpirun(), "-np", "2")
    medians = in_turns(
        {subject: partial(_seconds_to, "step 1/", folder, "digits", "--reduce-on-rdu"), peer: both}, 5, warm=True
    )
    yield Figure("first step at np 2", subject, peer, "difference at most 2 s", medians)
    pef = str(compile_workload(workloads.GPT2_SMALL, folder))
    for sync, flags in {"device": ["--reduce-on-rdu"], "host": []}.items():
        begins = partial(_seconds_to, "batch ", folder, pef, *flags)  # the last that is printed before
        medians = in_turns({subject: begins, peer: both}, 5, warm=True)
        goal = "difference at most 0.5 s"
        yield Figure(f"GPT-2 small begins its first step, np 2, {sync} sync", subject, peer, goal, medians)
    app = ("app", str(ROOT / "examples" / "sambaflow" / "logistic_regression.py"))
    THIS.call(*app, "compile", "-b", "32", "--pef-name", "app", folder=folder)
    subject, peer = "sambasim app … test", "a plain PyTorch step"
    testing = _called(folder, *app, "test", "-b", "32", "--pef", "app")
    medians = in_turns({subject: testing, peer: python(_PLAIN_SCRIPT)}, 5, warm=True)
    yield Figure("an app's first step", subject, peer, "ratio at most 1", medians)


def _seconds_to(beginning: str, folder: Path, pef: str, *flags: str) -> Sequence[float]:
    """From the command to the line with this `beginning`."""
    command = THIS.argv("run", *flags, "--no-evaluate", "--steps", "2", "--pef", pef, np=2)
    began_s = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, env=THIS.environ(), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith(beginning):
                elapsed_s = time.perf_counter() - began_s
        process.wait(timeout=TIMEOUT_S)
    return [elapsed_s]


_ALL = (parallel, schedules, start, compiling, steps, bf16, hosts, lengths, reading, memory, sync, overhead, plan)
FIGURES = {measure.__name__: measure for measure in _ALL}
