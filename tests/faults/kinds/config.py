"""The TOML config: not there, not TOML, or holding what is not an option."""

from pathlib import Path

from tests.faults.fault import Fault
from tests.faults.texts import net

_COMPILE = "compile --config net.toml"
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


def _config(old: str, new: str, *, without: str = "") -> dict[str, str]:
    """The sound config with `new` for `old`."""
    assert old in _SOUND
    assert without in _SOUND
    return {"net.py": net(), "net.toml": _SOUND.replace(without, "").replace(old, new)}


def _binary(folder: Path) -> None:
    (folder / "net.toml").write_bytes(b"\xff\xfe\x00")


CONFIG: tuple[Fault, ...] = (
    Fault("missing", _COMPILE, 2, ("there is no config file net.toml", "check the path after --config")),
    Fault(
        "a folder",
        "compile --config configs",
        2,
        ("the config file configs cannot be read: Is a directory", "--config FILE.toml"),
        {"configs/net.toml": _SOUND},
    ),
    Fault("not text", _COMPILE, 2, ("net.toml cannot be read: it is not UTF-8 text",), prepare=_binary),
    Fault(
        "not TOML",
        _COMPILE,
        2,
        ("the config is not valid TOML: expected", "where: net.toml:10: [optimizer\n", "correct that line"),
        _config("[optimizer]", "[optimizer"),
    ),
    Fault(
        "an unknown key",
        _COMPILE,
        2,
        ("training.batchsize: is not an option", "where: net.toml", "did you mean training.batch_size?"),
        _config("batch_size", "batchsize"),
    ),
    Fault(
        "a key in the wrong table",
        _COMPILE,
        2,
        ("training.lr: is not an option", "did you mean optimizer.lr?"),
        _config("batch_size = 4", "batch_size = 4\nlr = 0.1"),
    ),
    Fault(
        "text for a number",
        _COMPILE,
        2,
        ('training.batch_size = "4": must be a whole number', "where: net.toml"),
        _config("batch_size = 4", 'batch_size = "4"'),
    ),
    Fault(
        "several at once",
        _COMPILE,
        2,
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
        "no model",
        _COMPILE,
        2,
        ("no model is named", "where: net.toml", "sambasim compile path/file.py:NAME"),
        _config('[model]\ntarget = "net.py:Net"\n', ""),
    ),
    Fault(
        "the model's file is not there",
        _COMPILE,
        2,
        ("error[model]", "there is no file HERE/nett.py", "did you mean HERE/net.py?"),
        _config("net.py:Net", "nett.py:Net"),
    ),
)
