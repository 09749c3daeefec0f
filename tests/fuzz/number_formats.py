"""The formats of files whose number fields `tests.fuzz.numbers` tries: how each is made, read and written, and which
commands read it."""

import json
import math
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import tomli_w
from pydantic import TypeAdapter

from sambasim.errors import MOST_REPLICAS
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, shipped_text
from sambasim.options.compile import CompileFile
from sambasim.pef.document import PefDocument
from sambasim.records.digests import RecordedRun, StepDigests
from sambasim.records.metrics import CheckpointRecord, EvaluationRecord, StepRecord, SummaryRecord
from sambasim.runtime.checkpoint import content
from sambasim.units import MIB
from tests.faults.command import sambasim
from tests.fuzz.subjects import sealed
from tests.pef.damage import put_together, unpack

VALUES = (10**5, 2**46, 10**30, 0, -1, math.nan, math.inf, MOST_REPLICAS)
MOST_S, MOST_BYTES = 10, 500 * MIB

Place: TypeAlias = tuple[str | int, ...]

_MAPPINGS = ("symbols", "values", "regions", "tensors", "shards", "graphs", "mesh", "own")
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
        (PefDocument,),
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
