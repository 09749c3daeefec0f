"""Flags of sync and accumulation against what is run."""

from argparse import Namespace

import pytest

from sambasim.ir.graph import SectionKind
from sambasim.samba.checks import sync as module
from sambasim.samba.checks.sync import Accumulation
from sambasim.samba.checks.telling import Telling

BACKWARD = {SectionKind.FWD, SectionKind.BCKWD}


@pytest.mark.parametrize(
    ("typed", "backwards", "words"),
    [
        (1, 4, None),
        (4, 4, None),
        (4, 1, "--grad-accumulation-steps 4 was typed, but 1 backward makes an optimizer step"),
        (4, 3, "--grad-accumulation-steps 4 was typed, but 3 backwards make an optimizer step"),
        (4, 5, "--grad-accumulation-steps 4 was typed, but 5 backwards make an optimizer step"),
    ],
)
def test_another_number_of_backwards_than_was_typed_is_found(
    monkeypatch: pytest.MonkeyPatch, typed: int, backwards: int, words: str | None
) -> None:
    told = Telling(on_demand=True)
    monkeypatch.setattr(module, "telling", told)
    accumulation = Accumulation(Namespace(grad_accumulation_steps=typed))
    for _ in range(backwards):
        accumulation.note({SectionKind.FWD})
        accumulation.note(BACKWARD)
    accumulation.note({SectionKind.OPT})
    accumulation.note({*BACKWARD, SectionKind.OPT})
    assert [finding.what for finding in told.findings] == ([] if words is None else [words])
