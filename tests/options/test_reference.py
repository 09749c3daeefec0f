"""The reference of the config names every field, and no other."""

import re

from pydantic import BaseModel

from sambasim.options.compile import BuildOptions
from sambasim.options.data import DataOptions
from sambasim.options.training import (
    LossOptions,
    ModelOptions,
    OptimizerOptions,
    ScheduleOptions,
    TrainingOptions,
)
from tests.support.mpi import ROOT

TABLES: dict[str, type[BaseModel]] = {
    "model": ModelOptions,
    "data": DataOptions,
    "loss": LossOptions,
    "optimizer": OptimizerOptions,
    "training": TrainingOptions,
    "training.schedule": ScheduleOptions,
    "compile": BuildOptions,
}


def test_the_reference_names_every_field_and_no_other() -> None:
    text = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    known = {f"{table}.{field}" for table, schema in TABLES.items() for field in schema.model_fields}
    assert documented == known - {"training.schedule"}
