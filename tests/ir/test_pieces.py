"""Parameter groups in pieces: the same memory and the same work, in the order in which gradients are completed."""

from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from sambasim.compiler.capture.step import Example
from sambasim.compiler.front import compile_shapes
from sambasim.ir.dataflow import groups_of, readiness
from sambasim.ir.pieces import in_pieces
from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES
from tests.support.compiled import net_options

LIMIT_BYTES = 24_000


def clipped() -> Program:
    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(size, 48) for size in (24, 48, 48, 48)), nn.Linear(48, 200))

    def example(_: nn.Module) -> Example:
        return Example({"input": torch.zeros(4, 24), "target": torch.zeros(4, dtype=torch.int64)}, False)

    how = {"optimizer": {"name": "adamw", "max_grad_norm": 1.0}, "loss": {"name": "cross_entropy"}}
    return compile_shapes(layers, example, net_options(Path("out"), **how, data_parallel=True))


def addresses(program: Program) -> dict[str, int]:
    """Where the symbols of groups lie."""
    return {
        name: group.regions[region] + member.start * DTYPE_BYTES[group.region_type(region).dtype]
        for group in program.groups
        for member in group.members
        for region, name in program.optimizers[group.optimizer].symbols_of(member).items()
    }


def test_pieces_lie_where_their_group_does_and_do_its_work() -> None:
    whole = clipped()
    pieces = in_pieces(whole, LIMIT_BYTES)
    assert len(whole.groups) < len(pieces.groups)
    assert addresses(pieces) == addresses(whole)
    assert sum(group.numel for group in pieces.groups) == sum(group.numel for group in whole.groups)
    for group in pieces.groups:
        assert len(group.members) == 1 or group.numel * DTYPE_BYTES[group.dtype] <= LIMIT_BYTES
        assert all(a.start + a.numel <= b.start for a, b in pairwise(group.members))
        assert group.members[0].start == 0
    names, worked = [group.name for group in pieces.groups], dict[str, list[str]]()
    for node in pieces.step.nodes:
        worked.setdefault(node.operator, []).extend(groups_of(node))
    of_groups = {operator for operator, found in worked.items() if found}
    assert of_groups == {"comm.reduce_scatter", "opt.square_sums", "opt.adamw", "comm.all_gather"}
    assert all(worked[operator] == names for operator in of_groups)


def test_a_piece_is_complete_before_the_next_one() -> None:
    pieces = in_pieces(clipped(), LIMIT_BYTES)
    ready = readiness(pieces, by_node=True)
    complete = [ready[group.name].reduce for group in pieces.groups]
    assert complete == sorted(complete)
    assert len({*complete}) == len(complete)


def test_groups_that_are_small_enough_stay() -> None:
    program = clipped()
    assert in_pieces(program).groups == program.groups
