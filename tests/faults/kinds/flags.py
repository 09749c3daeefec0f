"""Flags and the TOML config: unknown, contradicting each other, or not fitting the PEF."""

from tests.faults.fault import Fault
from tests.faults.texts import COMPILE, NAMED_LOSS, net

NET = {"net.py": net()}

_CONFIG = "compile --config net.toml"
_SOUND = """[model]
target = "net.py:Net"

[data]
source = "net.py:samples"

[loss]
name = "cross_entropy"

[optimizer]
name = "sgd"

[training]
batch_size = 4
"""


def _config(old: str, new: str) -> dict[str, str]:
    """The sound config with `new` for `old`."""
    assert old in _SOUND
    return {"net.py": net(), "net.toml": _SOUND.replace(old, new)}


FLAGS: tuple[Fault, ...] = (
    Fault("a command that is none", "compil", ("error[usage]", "No such command 'compil'.")),
    Fault("no PEF", "run --steps 3", ("Missing option '-p' / '--pef'.", "try:   sambasim run --help")),
    Fault("a word for a number", "compile -b four", ("'-b' / '--batch-size': 'four' is not a valid integer", "--help")),
    Fault(
        "an unknown device",
        "compile --arch sn31",
        ("'--arch': 'sn31' is not one of 'sn10', 'sn30', 'sn40'", "sambasim compile --help"),
    ),
    Fault(
        "no optimizer",
        "compile net.py:Net --set data.source=net.py:samples",
        ("optimizer.name: is missing, and training needs one", "--set optimizer.name=adamw (or --inference)"),
        NET,
    ),
    Fault(
        "several at once",
        f"{COMPILE} {NAMED_LOSS} -ws 3 --set optimizer.lr=-1 --set training.seed=x",
        (
            "3 options are wrong:",
            "optimizer.lr = -1 (from --set): must be at least 0",
            'training.seed = "x" (from --set): must be a whole number',
            "compile.world_size = 3 (from --world-size): needs data parallelism (add --data-parallel)",
            "correct each of them",
        ),
        NET,
    ),
    Fault(
        "-ws for a run",
        "run --pef pair -ws 2",
        ("-ws is for compile", "a run has as many as mpirun starts", "mpirun -np 2 sambasim run"),
        pefs=("pair",),
    ),
    Fault("no steps", "run --pef net --steps 0", ("training.steps = 0: must be at least 1",), pefs=("net",)),
    Fault(
        "losses that are not finite, of an inference",
        "run --pef net --inference --on-nonfinite skip --debug-numerics",
        (
            "2 options are wrong:",
            "on_nonfinite (from --on-nonfinite): is for training, and this is inference",
            "leave out --on-nonfinite",
            "debug_numerics (from --debug-numerics): is for training",
        ),
        pefs=("net",),
    ),
    Fault(
        "a look at operators that a compiler fuses",
        "run --pef net --debug-numerics --engine inductor",
        ("engine = inductor (from --engine): fuses operators, and --debug-numerics checks", "leave out one of the two"),
        pefs=("net",),
    ),
    Fault(
        "a trace that cannot be written",
        "run --pef net --trace net.py/t.json",
        ("error[option]", "the trace cannot be written to", "net.py is not a folder", "another place: --trace FILE"),
        NET,
        pefs=("net",),
    ),
    Fault(
        "digests beside a trace",
        "run --pef net --record-digests d --trace t.json",
        ("record_digests (from --record-digests): takes most of the time of a step", "leave out --record-digests or"),
        pefs=("net",),
    ),
    Fault(
        "training with a PEF for inference",
        "run --pef guess",
        ("this PEF was compiled for inference and cannot train", "add --inference"),
        pefs=("guess",),
    ),
    Fault(
        "too few replicas to emulate",
        "run --pef pair --emulate-replicas 1",
        (
            "at least 2 replicas (-ws 2), and --emulate-replicas 1 was asked for",
            "try:   sambasim run --pef pair --emulate-replicas 2",
        ),
        pefs=("pair",),
    ),
    Fault(
        "replicas to emulate of a PEF for one",
        "run --pef net --emulate-replicas 2",
        (
            "this PEF has no REDUCE and GATHER sections",
            "compile it with --data-parallel -ws 2",
            "sambasim run --pef net\n",
        ),
        pefs=("net",),
    ),
    Fault(
        "data parallelism of a PEF for one",
        "run --pef net --data-parallel",
        (
            "--data-parallel needs REDUCE and GATHER sections, and the PEF net has none",
            "compile it with --data-parallel",
        ),
        pefs=("net",),
    ),
    Fault("a config that is missing", _CONFIG, ("there is no config file net.toml", "check the path after --config")),
    Fault(
        "a config that is not TOML",
        _CONFIG,
        ("the config is not valid TOML: expected", "where: net.toml:10: [optimizer\n", "correct that line"),
        _config("[optimizer]", "[optimizer"),
    ),
    Fault(
        "several in a config",
        _CONFIG,
        (
            "3 options are wrong:",
            'optimizer.name = "sgdd": must be sgd, adam, adamw, adagrad or lion (did you mean sgd?)',
            "training.epochs = 0: must be at least 1",
            "training.batchsize: is not an option (did you mean training.batch_size?)",
            "where: net.toml",
            "--set NAME=VALUE overrides the config",
        ),
        _config('"sgd"\n\n[training]\nbatch_size = 4', '"sgdd"\n\n[training]\nbatchsize = 4\nepochs = 0'),
    ),
    Fault(
        "a config without a model",
        _CONFIG,
        ("no model is named", "where: net.toml", "sambasim compile path/file.py:NAME"),
        _config('[model]\ntarget = "net.py:Net"\n', ""),
    ),
)
