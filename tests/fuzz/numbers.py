"""`python -m tests.fuzz.numbers FORMAT…`: puts numbers that nobody expects into every number field of every format, and
runs every command that reads it. Fields are found in the files, and by the schemas those that are null there."""

import argparse
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import tomli_w
from pydantic import TypeAdapter

from sambasim.errors import MOST_REPLICAS
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, shipped_text
from sambasim.options.compile import CompileFile
from sambasim.pef.document import Manifest
from sambasim.records.digests import RecordedRun, StepDigests
from sambasim.records.metrics import CheckpointRecord, EvaluationRecord, StepRecord, SummaryRecord
from sambasim.runtime.checkpoint import content
from sambasim.units import KIB, MIB
from tests.faults.command import sambasim
from tests.fuzz.subjects import sealed
from tests.pef.damage import put_together, unpack

VALUES = (10**5, 2**46, 10**30, 0, -1, math.nan, math.inf, MOST_REPLICAS)
MOST_S, MOST_BYTES = 10, 500 * MIB

Place: TypeAlias = tuple[str | int, ...]
Run: TypeAlias = "Callable[[str, Path], Outcome]"

_MAPPINGS = ("symbols", "values", "regions", "tensors", "shards", "further", "mesh", "own")
"""Keys of mappings by names that are no fields."""

_NET = "tests.zoo.own_data:WideAndDeep"
_INPUTS = """--set 'data.inputs={items="int64[8] < 40", target="float32[]"}'"""
_COMPILE = f"compile {_NET} --check 0 --set loss.name=mse -b 4 --set data.source=synthetic {_INPUTS}"
_RUN = "--trust --threads 1 --no-evaluate --steps 2"


@dataclass(frozen=True, slots=True)
class Format:
    """Files of one format: `make` makes some in a folder, `load` and `store` are of one, `schemas` are of its content.
    `commands` name it FILE."""

    make: Callable[[Path], Iterable[Path]]
    load: Callable[[Path], Any]
    store: Callable[[Path, Any], None]
    commands: Sequence[str]
    schemas: Sequence[Any] = ()


def number_names(schemas: Sequence[Any]) -> set[str]:
    """The names of fields that can be numbers."""
    names: set[str] = set()

    def is_number(schema: Any) -> bool:
        parts = (schema, *schema.get("anyOf", ()))
        return any(part.get("type") in ("integer", "number") for part in parts)

    def walk(schema: Any) -> None:
        if isinstance(schema, dict):
            fields = schema.get("properties", {})
            names.update(name for name, one in fields.items() if isinstance(one, dict) and is_number(one))
        for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            walk(inner)

    for schema in schemas:
        walk(TypeAdapter(schema).json_schema())
    return names


def places(content: Any, names: Collection[str], at: Place = ()) -> Iterator[Place]:
    """Where numbers are in `content`, and then where null is for one of `names`."""
    is_named = bool(at) and at[-1] in names
    if isinstance(content, dict | list):
        for key, inner in content.items() if isinstance(content, dict) else enumerate(content):
            yield from places(inner, names, (*at, key))
    elif type(content) in (int, float) or (content is None and is_named):
        yield at


def field_of(content: Any, place: Place) -> str:
    """The field at `place`: without indices and names, but with those of tuples, and of arguments of an operator."""
    words: list[str] = []
    for depth, key in enumerate(place):
        operator = content.get("operator") if isinstance(content, dict) else None
        if isinstance(operator, str) and key in ("args", "kwargs"):
            inside = place[depth + 1 :]
            name = content["kwargs"][inside[0]][0] if key == "kwargs" else inside[0]
            return ".".join((*words, operator, str(name), *("*" for _ in inside[2 if key == "kwargs" else 1 :])))
        is_item = isinstance(content, list)
        is_of_tuple = is_item and depth + 1 == len(place) and depth > 0 and isinstance(place[-2], int)
        is_name = (is_item and not is_of_tuple) or (place[depth - 1 : depth] and place[depth - 1] in _MAPPINGS)
        words.append("*" if is_name else str(key))
        content = content[key]
    return ".".join(words)


def fields(content: Any, names: set[str]) -> dict[str, Place]:
    """One place of each field, with a number if there is one."""
    found: dict[str, Place] = {}
    for place in sorted(places(content, names), key=lambda place: value_at(content, place) is None):
        found.setdefault(field_of(content, place), place)
    return found


def value_at(content: Any, place: Place) -> Any:
    for key in place:
        content = content[key]
    return content


def put(content: Any, place: Place, value: object) -> None:
    value_at(content, place[:-1])[place[-1]] = value


def _pef_flags() -> Mapping[str, str]:
    sgd, of_two = "--set optimizer.name=sgd --set optimizer.momentum=0.9", "--pipeline-stages 2 --micro-batches 2"
    return {
        "pair": f"--set optimizer.name=adamw --max-grad-norm 1 --data-parallel --check 2 {_with_schedule('step')}",
        "stages": f"--set optimizer.name=adamw {of_two} {_with_schedule('one_cycle')}",
        "cut": f"{sgd} --tensor-parallel weight --n-chips 2 --dtype fp16 {_with_schedule('warmup_cosine')}",
        "guess": "--inference",
    }


def _typed(folder: Path, line: str) -> None:
    sambasim(line, folder).check()


def _pefs(folder: Path) -> Iterator[Path]:
    for name in _pef_flags():
        yield _pair(folder, name)


def _store_pef(path: Path, fields: Any) -> None:
    _, weights = unpack(path.read_bytes())
    path.write_bytes(put_together(fields, weights))


@cache
def _compiled(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        _typed(Path(folder), f"{_COMPILE} --pef-name {name} {_pef_flags()[name]}")
        return Path(folder, "out", name, f"{name}.pef").read_bytes()


def _pair(folder: Path, name: str = "pair") -> Path:
    path = folder / "out" / name / f"{name}.pef"
    path.parent.mkdir(parents=True)
    path.write_bytes(_compiled(name))
    return path


def _toml(names: Sequence[str]) -> Callable[[Path], Iterator[Path]]:
    def make(folder: Path) -> Iterator[Path]:
        _pair(folder)
        for name in names:
            table, links = tomllib.loads(shipped_text(name)), tomllib.loads(shipped_text("links.toml"))
            linked = {key: {"name": link, **links[link]} for key, link in table.items() if key.endswith("_link")}
            path = folder / Path(name).name
            path.write_text(tomli_w.dumps(table | linked))
            yield path

    return make


_SCHEDULES: Mapping[str, Mapping[str, object]] = {
    "step": {"step_size": 2, "warmup_steps": 1, "gamma": 0.5},
    "one_cycle": {"up_steps": 2, "down_steps": 2, "rate": 0.5, "step_size": 1, "momentum": [0.8, 0.9]},
    "warmup_cosine": {"warmup_steps": 2, "total_steps": 4, "start_factor": 0.1, "final_factor": 0.1},
    "range_test": {"step_size": 2, "rate": 1.0},
}


def _with_schedule(name: str) -> str:
    settings = {"name": name, **_SCHEDULES[name]}
    return " ".join(f"--set training.schedule.{key}={str(value).replace(' ', '')}" for key, value in settings.items())


def _configs(folder: Path) -> Iterator[Path]:
    """Their tables have all fields of the schema, which are null where they have no default."""
    data = {"source": "synthetic", "inputs": {"items": "int64[8] < 40", "target": "float32[]"}, "samples": 64}
    tables: dict[str, tuple[Any, str, Any]] = {
        "sgd": ({"momentum": 0.9}, "step", {}),
        "adamw": ({"betas": [0.9, 0.99]}, "one_cycle", {"compile": {"dtype": "fp16"}}),
        "lion": ({}, "warmup_cosine", {"parallel": {"data_parallel": True}}),
        "adagrad": ({"lr_decay": 0.1}, "range_test", {"data": {**data, "workers": 1, "prefetch_factor": 2}}),
    }
    for name, (optimizer, schedule, more) in tables.items():
        training = {"batch_size": 4, "schedule": {"name": schedule, **_SCHEDULES[schedule]}}
        base = {"model": {"target": _NET}, "data": data, "loss": {"name": "mse"}, "training": training}
        path = folder / f"{name}.toml"
        path.write_text(tomli_w.dumps({**base, "optimizer": {"name": name, **optimizer}, **more}))
        yield path


def _load_config(path: Path) -> Any:
    """With null for every field of the schema that it lacks."""
    return _filled(tomllib.loads(path.read_text()), CompileFile.model_json_schema())


def _filled(table: Any, schema: Any, whole: Any = None) -> Any:
    whole = whole or schema
    for name, one in schema.get("properties", {}).items():
        options = [one, *one.get("anyOf", ()), *one.get("allOf", ())]
        inner = next((whole["$defs"][part["$ref"].rpartition("/")[2]] for part in options if "$ref" in part), None)
        if inner is not None:
            table[name] = _filled(dict(table.get(name, {})), inner, whole)
        elif any(part.get("type") in ("integer", "number") for part in options):
            table.setdefault(name, None)
    return table


def _without_null(content: Any) -> Any:
    if isinstance(content, dict):
        kept = {key: _without_null(value) for key, value in content.items() if value is not None}
        return {key: value for key, value in kept.items() if value != {}}
    return content


def _store_toml(path: Path, content: Any) -> None:
    path.write_text(tomli_w.dumps(_without_null(content)))


_DEEPSPEED: Mapping[str, Mapping[str, Any]] = {
    "warmup": {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0, "steps_per_print": 10,
        "optimizer": {
            "type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.01},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3, "warmup_num_steps": 2, "total_num_steps": 9},
        },
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
    },
    "cycle": {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "decay_lr_rate": 0.1, "decay_step_size": 2,
                "cycle_first_step_size": 2, "cycle_second_step_size": 2, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9,
                "decay_mom_rate": 0, "cycle_first_stair_count": 0, "last_batch_iteration": -1,
            },
        },
    },
    "half": {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "fp16": {
            "enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 100, "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "scheduler": {
            "type": "LRRangeTest",
            "params": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1},
        },
    },
}  # fmt: skip


def _deepspeed(folder: Path) -> Iterator[Path]:
    _pair(folder)
    for name, config in _DEEPSPEED.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(config))
        yield path


def _checkpoints(folder: Path) -> Iterator[Path]:
    _pair(folder)
    _typed(folder, f"run --pef pair {_RUN} --emulate-replicas 2 --checkpoint-dir saved")
    yield next((folder / "saved").glob("step-*")) / "checkpoint.json"


def _metrics(folder: Path) -> Iterator[Path]:
    _pair(folder)
    run = "--threads 1 --steps 2 --emulate-replicas 2 --set data.evaluation_fraction=0.2 --predict"
    _typed(folder, f"run --pef pair --trust {run} --metrics run.jsonl --checkpoint-dir saved --cluster sn30-8")
    yield folder / "run.jsonl"


def _digests(folder: Path) -> Iterator[Path]:
    _pair(folder)
    _typed(folder, f"run --pef pair {_RUN} --emulate-replicas 2 --record-digests sound")
    yield from (folder / "sound" / name for name in ("run.json", "replica-0.jsonl"))


def _schedules(folder: Path) -> Iterator[Path]:
    (folder / "rows.csv").write_text("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    yield folder / "rows.csv"


def _load_csv(path: Path) -> Any:
    cells = [line.split(",") for line in path.read_text().splitlines()]
    return [[[int(cell[0]), cell[1], int(cell[2])] if cell else [] for cell in row] for row in cells]


def _store_csv(path: Path, rows: Any) -> None:
    path.write_text("".join(",".join("".join(map(str, cell)) for cell in row) + "\n" for row in rows))


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _store_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def _lines(path: Path) -> Any:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _store_lines(path: Path, lines: Any) -> None:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _by_suffix(of_json: Callable[..., Any], of_lines: Callable[..., Any]) -> Callable[..., Any]:
    return lambda path, *rest: (of_lines if path.suffix == ".jsonl" else of_json)(path, *rest)


_PREDICTING = ("simulate {}", "simulate {} --replicas 1,4", "tilestat {}", "report {} --html page.html")

FORMATS: Mapping[str, Format] = {
    "pef": Format(
        _pefs, lambda path: unpack(path.read_bytes())[0], _store_pef,
        ("verify FILE", "inspect FILE --all", "inspect FILE --json", *(one.format("FILE") for one in _PREDICTING),
         "devices --pef FILE", "compare FILE FILE", "plan FILE", f"run --pef FILE {_RUN} --predict",
         f"run --pef FILE {_RUN} --emulate-replicas 2"),
        (Manifest,),
    ),
    "device": Format(
        _toml(("devices/sn30.toml", "devices/sn40l.toml")), lambda path: tomllib.loads(path.read_text()), _store_toml,
        ("devices --arch FILE", *(f"{one.format('pair')} --arch FILE" for one in _PREDICTING), "plan pair --arch FILE"),
        (DeviceSpec,),
    ),
    "cluster": Format(
        _toml(("clusters/sn30-8.toml",)), lambda path: tomllib.loads(path.read_text()), _store_toml,
        ("devices --cluster FILE", "simulate pair --replicas 1,64 --cluster FILE", "plan pair --cluster FILE",
         "report pair --html page.html --cluster FILE", f"run --pef pair {_RUN} --predict --cluster FILE"),
        (ClusterSpec,),
    ),
    "config": Format(
        _configs, _load_config, _store_toml,
        ("compile --config FILE", "simulate FILE", "plan FILE", "estimate-memory FILE"), (CompileFile,),
    ),
    "deepspeed": Format(
        _deepspeed, _json, _store_json,
        (f"{_COMPILE.replace(' -b 4', '')} --data-parallel -ws 2 --deepspeed FILE",
         f"run --pef pair {_RUN} --emulate-replicas 2 --deepspeed FILE"),
    ),
    "schedule": Format(
        _schedules, _load_csv, _store_csv,
        (f"{_COMPILE} --set optimizer.name=sgd --pipeline-stages 2 --micro-batches 2 --schedule FILE",),
    ),
    "checkpoint": Format(
        _checkpoints, _json, lambda path, fields: _store_json(path, sealed(fields)),
        ("compare DIR DIR", f"run --pef pair {_RUN} --emulate-replicas 2 --resume DIR",
         f"run --pef pair {_RUN} --steps 4 --emulate-replicas 2 --resume DIR"),
        (content.Manifest,),
    ),
    "metrics": Format(
        _metrics, _lines, _store_lines, ("report FILE --html page.html", "compare FILE FILE"),
        (StepRecord, EvaluationRecord, CheckpointRecord, SummaryRecord),
    ),
    "digests": Format(
        _digests, _by_suffix(_json, _lines), _by_suffix(_store_json, _store_lines),
        ("compare DIR DIR", "compare sound DIR"), (RecordedRun, StepDigests),
    ),
}  # fmt: skip


class Outcome(NamedTuple):
    """Of one command: its exit code, what is wrong or "", and what it took."""

    code: int
    fault: str
    cpu_s: float
    bytes: int


def run_here(line: str, folder: Path) -> Outcome:
    """What `sambasim LINE` does, in this process."""
    began_s = time.process_time()
    try:
        outcome = sambasim(line, folder)
    except BaseException:
        return Outcome(-1, traceback.format_exc(limit=-4)[-1500:], 0, 0)
    code, text = outcome.returncode, outcome.stderr
    answers = (0, 1, 2, 3) if line.startswith(("compare", "plan")) else (0, 2, 3)  # 1: they differ; nothing fits
    is_refused_or_done = code in answers and "Traceback" not in text
    fault = "" if is_refused_or_done else f"exit code {code}: {text[-800:]}"
    return Outcome(code, fault, time.process_time() - began_s, 0)


def run(line: str, folder: Path) -> Outcome:
    """What `sambasim LINE` does, in a copy of this process, which ends it after MOST_S or above MOST_BYTES."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        _be_measured(line, folder, theirs)
    theirs.close()
    try:
        return Outcome(*ours.recv()) if ours.poll(12 * MOST_S) else Outcome(-1, "it hangs", MOST_S, 0)
    except EOFError:
        return Outcome(-1, f"it took more than {2 * MOST_S} s of the processor, or was killed", 2 * MOST_S, 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _be_measured(line: str, folder: Path, answers: Connection) -> None:
    code, fault = -1, ""
    began_s, resident = time.process_time(), 0
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident, data = (int(status[key].split()[0]) * KIB for key in ("VmRSS", "VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + 2 * MOST_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_S, 2 * MOST_S))
        code, fault, *_ = run_here(line, folder)
    finally:
        seconds = time.process_time() - began_s
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB - resident
        if seconds > MOST_S:
            fault = f"it took {seconds:.0f} s {fault}"
        if peak > MOST_BYTES:
            fault = f"it took {peak / MIB:.0f} MiB {fault}"
        answers.send((code, fault, seconds, peak))
        os._exit(0)


@cache
def prepared(name: str) -> tuple[Path, list[tuple[Path, Any, str, Place]]]:
    """A folder, and the fields of `name`: each with its file and the content of that."""
    folder = Path(tempfile.mkdtemp(prefix=f"sambasim-numbers-{name}-"))
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    made, names = FORMATS[name], number_names(FORMATS[name].schemas)
    found: dict[str, tuple[Path, Any, str, Place]] = {}
    for path in made.make(folder):
        content = made.load(path)
        for field, place in fields(content, names).items():
            before = found.get(field)
            if before is None or value_at(before[1], before[3]) is None:
                found[field] = (path, content, field, place)
    return folder, list(found.values())


def check_sound(name: str) -> None:
    """Files without a change are taken by a command at least, or nothing is learnt from what a number changes. It runs
    here, and so imports what its copies need."""
    folder, found = prepared(name)
    for path in {path for path, *_ in found}:
        sound = [run_here(_line(command, path), folder) for command in FORMATS[name].commands]
        assert any(one.code == 0 for one in sound), sound
        assert all(one.code in (0, 2) and not one.fault for one in sound), sound


def _line(command: str, path: Path) -> str:
    return command.replace("FILE", str(path)).replace("DIR", str(path.parent))


def cases(name: str) -> list[tuple[int, object]]:
    """A field by its number, and a value for it."""
    return list(product(range(len(prepared(name)[1])), VALUES))


def try_case(name: str, number: int, value: object, run: Run = run) -> Iterator[tuple[str, Outcome]]:
    """What each command does with the file."""
    folder, found = prepared(name)
    path, content, _, place = found[number]
    sound, made = path.read_bytes(), FORMATS[name]
    changed = json.loads(json.dumps(content))
    put(changed, place, value)
    try:
        made.store(path, changed)
        for command in made.commands:
            yield command, run(_line(command, path), folder)
    finally:
        path.write_bytes(sound)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.numbers", description=__doc__)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}; default: all")
    parser.add_argument("--match", default="", help="only fields with this text")
    parser.add_argument("--list", action="store_true", help="only print the fields")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    findings = 0
    for name in given.formats or FORMATS:
        folder, found = prepared(name)
        if given.list:
            print(*(f"{name}: {field}" for _, _, field, _ in found), sep="\n")
            continue
        check_sound(name)
        runs, worst_s, worst_bytes, codes = 0, (0.0, ""), (0, ""), dict[int, int]()
        for number, value in cases(name):
            field = found[number][2]
            if given.match not in field:
                continue
            for command, outcome in try_case(name, number, value):
                what = f"{field} = {value!r}: {command}"
                runs += 1
                codes[outcome.code] = codes.get(outcome.code, 0) + 1
                worst_s, worst_bytes = max(worst_s, (outcome.cpu_s, what)), max(worst_bytes, (outcome.bytes, what))
                if outcome.fault:
                    findings += 1
                    print(f"{name}: {what}\n    {outcome.fault}", flush=True)
        print(
            f"{name}: {len(found)} fields, {runs} runs, exit codes {codes}; at most {worst_s[0]:.1f} s ({worst_s[1]}), "
            f"{worst_bytes[0] / MIB:.0f} MiB ({worst_bytes[1]})",
            flush=True,
        )
        shutil.rmtree(folder)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
