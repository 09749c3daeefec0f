"""A DeepSpeed config in a test: the options that a compile or a run gets from it, and the error if it is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sambasim.errors import OptionError
from sambasim.options.compile import CompileOptions, Compiling, options_and_notes
from sambasim.options.given import given_overrides
from sambasim.options.run import ResolvedRun, resolve_run, run_options, with_deepspeed

TWO = {"data_parallel": True, "world_size": 2}


def compiled(
    text: str | Mapping[str, Any],
    folder: Path,
    flags: Mapping[str, object] = TWO,
    overrides: list[str] | None = None,
    config: Path | None = None,
    target: str | None = None,
) -> Compiling:
    file = folder / "ds_config.json"
    file.write_text(text if isinstance(text, str) else json.dumps(text))
    return options_and_notes(config, target, overrides or [], {**flags, "deepspeed": file})


def refused(
    text: str | Mapping[str, Any], folder: Path, flags: Mapping[str, object] = TWO, target: str | None = None
) -> str:
    with pytest.raises(OptionError) as error:
        compiled(text, folder, flags, target=target)
    return str(error.value).replace(str(folder), "FOLDER")


def run(
    text: Mapping[str, Any],
    folder: Path,
    options: CompileOptions,
    overrides: list[str] | None = None,
    replicas: int = 2,
) -> ResolvedRun:
    """A run of what was compiled with `options`."""
    file = folder / "run.json"
    file.write_text(json.dumps(text))
    training, data, how = json.loads(
        json.dumps([options.training_defaults(), options.data_source(), options.model_dump(mode="json")])
    )
    chosen = run_options({"pef": "digits", "deepspeed": file}, given_overrides(overrides or []))
    chosen, mapped = with_deepspeed(chosen, training, how, replicas)
    return resolve_run(chosen, training, data, mapped.given)
