"""`docs/models.md`: the list of the zoo as a page. `python -m tests.zoo.page` writes it."""

import sys

from tests.support.mpi import ROOT
from tests.zoo import ENTRIES

PAGE = ROOT / "docs" / "models.md"

_HEAD = """# Supported models

`make zoo` compiles each of these models at a tiny size, trains it for three steps with one and two replicas, and
compares every loss with eager PyTorch (SGD, one thread). This page is written from its list,
by `python -m tests.zoo.page`.

## Equal to eager PyTorch in bits

| package | models |
|---|---|
"""

_TAIL = """
## What a model may contain

A model may hold any operator of PyTorch that has a static shape, and complex numbers between operators. Exceptions
(`python -m tests.operators` counts them): sizes that depend on values; sparse, quantized and nested tensors; other
devices; memory and files. Loops and branches of Python must not depend on values. If the code of a *library* branches
on them, the branch of the example batch is compiled; a step that takes another ends the run with
`error[assertion]`. Where your own code decides by values, the compile names the line and a rewrite.

Settings of `transformers` that are needed: `layerdrop=0` and `apply_spec_augment=False` in models of speech and time
series, and `experts_implementation="batched_mm"` in mixtures of experts.
"""


def page() -> str:
    exact: dict[str, list[str]] = {}
    other = ["## Others", "", "| model | verdict | reason |", "|---|---|---|"]
    for entry in ENTRIES.values():
        if entry.expected == "exact":
            exact.setdefault(entry.package, []).append(entry.name.removeprefix("timm_"))
        else:
            other.append(f"| {entry.name} | {entry.expected} | {entry.note} |")
    rows = [f"| {package} | {', '.join(names)} |" for package, names in exact.items()]
    return "\n".join([_HEAD + "\n".join(rows), *_TAIL.splitlines(), "", *other, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE} written\n")
