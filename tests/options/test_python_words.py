"""Messages in words of the Python API, for every flag, and for sentences in which flags stand."""

from typing import Any, Literal, get_args, get_origin

import pytest

from sambasim.options.fields import COMPILE_FLAGS, RUN_FLAGS
from sambasim.options.flag import Setting
from sambasim.options.given import given_flags, given_settings
from sambasim.options.python_words import in_python

_SETTINGS = [*COMPILE_FLAGS.items(), *RUN_FLAGS.items()]
_IN_PYTHON = {"emulate_replicas": "replicas"}
_OF_RUN = ("inference", "pef")
"""Of run in Python these are no keywords."""


def _value(setting: Setting) -> tuple[str, object]:
    """A value as it is typed in a shell, and as Python has it."""
    if get_origin(setting.kind) is Literal:
        choice = get_args(setting.kind)[0]
        return str(choice), choice
    return {int: ("3", 3), float: ("1e-3", 1e-3)}.get(setting.kind, ("out/some-file.x", "out/some-file.x"))


def _given(text: str) -> dict[str, Any]:
    """The keywords of a call that is written so."""
    return dict(eval(f"dict({text})"))


@pytest.mark.parametrize(("keyword", "setting"), _SETTINGS, ids=lambda one: one if isinstance(one, str) else "")
def test_every_flag_with_its_value_and_in_a_sentence_is_a_keyword_of_python(keyword: str, setting: Setting) -> None:
    compiles = keyword in COMPILE_FLAGS and keyword not in _OF_RUN
    if keyword == "pef":
        assert in_python("--pef out/net.pef", compiles=False) == "the PEF out/net.pef"
        return
    for name in (part for one in setting.flag.names for part in one.split("/")):
        typed, value = _value(setting)
        if setting.flag.choices:
            typed, value = "", name.strip("-")
        elif setting.kind is bool:
            typed, value = "", not name.startswith("--no-")
        said = in_python(f"{name} {typed}".strip(), compiles=compiles or keyword == "inference")
        assert _given(said) == {_IN_PYTHON.get(keyword, keyword): value}
    given_flags({keyword: value}, COMPILE_FLAGS if compiles else RUN_FLAGS)
    said = in_python(f"leave out {setting.flag.typed}, or another", compiles=True)
    assert "--" not in said
    assert keyword in _IN_PYTHON or keyword in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--emulate-replicas 2 was given", "replicas=2 was given"),
        ("add --tensor-parallel weight --n-chips 2", 'add tensor_parallel="weight", n_chips=2'),
        ("compile with --data-parallel -ws 2, or less", "compile with data_parallel=True, world_size=2, or less"),
        ("add --dtype bf16, or leave out --engine", 'add dtype="bf16", or leave out engine'),
        ("--recompute computes again here", "recompute computes again here"),
        ("--resume auto, or --resume DIR/step-…", 'resume="auto", or resume="DIR/step-…"'),
        ("--weights FILE.safetensors, made by --save", 'weights="FILE.safetensors", made by save'),
        ("lr = -1.0 (from --lr): must be at least 0", "lr = -1.0 (from lr): must be at least 0"),
        ("--sync-timeout SECONDS waits longer", "sync_timeout=SECONDS waits longer"),
        ("leave out --trace, or leave out --inference", "leave out trace, or call sambasim.run"),
        ("compile again: sambasim compile … --set loss.name=mse", 'compile again: sambasim.compile(…) with '
         'set={"loss.name": "mse"}'),
        ("mpirun -np 2 python a.py --epochs 3 --one-process-per-replica",
         "mpirun -np 2 python a.py --epochs 3, with one_process_per_replica=True"),
        ("pip install --upgrade x; cat --version", "pip install --upgrade x; cat --version"),
    ],
)  # fmt: skip
def test_sentences_with_flags(text: str, said: str) -> None:
    assert in_python(text, compiles=False, typed=["python", "a.py", "--epochs", "3"]) == said


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("loss.name=cross_entropy", "cross_entropy"),
        ("training.loss_scale.dynamic=false", False),
        ("optimizer.lr=1e-3", 1e-3),
        ("optimizer.betas=[0.9, 0.99]", [0.9, 0.99]),
        ('data.source="synthetic"', "synthetic"),
        ("optimizer.momentum=", None),
        ("training.schedule.step_size=…", ...),
    ],
)
def test_settings_are_those_of_python(text: str, value: object) -> None:
    said = _given(in_python(f"--set {text}", compiles=True).replace("…", "..."))
    assert said == {"set": {text.partition("=")[0]: value}}
    given_settings(said["set"])
