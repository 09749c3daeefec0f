"""The invariants of a program, each with a number and a sentence.

Every builder and every pass ends in `verify`, and so does reading a PEF: a pass may assume a valid program and must
leave one. Invariants 9 and 11 hold once the optimizer is attached, 7 and 8 once everything has its place in device
memory; a PEF is always at that last stage.

     1  every value is defined once, and is no symbol
     2  every reference names a symbol that the graph takes in, or the result of an earlier node
     3  every operator and every constant of torch is in its table of permitted ones
     4  sections are numbered from 0, and cover every node once and in order
     5  the nodes that work on a group come in the order of its data, each in a section behind the one before: the
        backward completes its gradients, copy, reduce_scatter, square_sums, the optimizer, all_gather, copy
     6  an output's value has the type of the symbol that keeps it; gradients have the type of their parameters
     7  a symbol in device memory is aligned, inside it, and overlaps no other but the accumulation group around it
     8  members of a group start at multiples of 64 elements, in order, and lie where the group's regions say
     9  groups have distinct names; every gradient and every optimizer state belongs to exactly one of them
    10  with the axis dp, one REDUCE section reduces every group along it (the mean, in the order of the tree), and one
        GATHER section gathers every group; each has a gradient group and fits into the reduce buffer. Without the axis
        there is none of these. Its size is a multiple of the chips of a replica, and one replica unless a run chooses.
        Communication names an axis of the mesh, and what is cut has a part for each rank on one
    11  a training step has a loss, a tangent of its type, and one optimizer node for each group; it returns every
        gradient. If one optimizer clips, all do, by the norm of all gradients, summed over every axis of the mesh
    12  every type and every size is within what a machine can address
    13  nodes that work on groups name groups of the program, in sections of their kind, behind every other node;
        evaluation graphs are all FWD
    14  the first extent of every input is the batch size
    15  an output of a graph is kept in a symbol of kind output, gradient or buffer
    16  with the axis pp there is a schedule for its ranks that can run, and without it there is none; a section of a
        pass has a stage of the schedule, and reads only what its own rank makes, or receives from the one that sends
        it. A trained parameter is read where its gradient is completed. If one more rank reads it, that rank updates
        it, in a group of its own: copy nodes bring the gradient there and the parameter back
    17  every parameter has a name in the state_dict of its model, and no name there is that of two symbols
"""

from enum import IntEnum

from sambasim.ir.program import Program
from sambasim.ir.verify.groups import (
    verify_data_parallel,
    verify_group,
    verify_memory,
    verify_names,
    verify_outputs,
    verify_ownership,
    verify_sections,
    verify_types,
    verify_values,
)
from sambasim.ir.verify.training import verify_copies, verify_pipeline, verify_training, verify_updates


class Progress(IntEnum):
    """How far the compiler is with a program."""

    CAPTURED = 0
    OPTIMIZED = 1  # the optimizer is attached, parameters are in groups
    PLACED = 2  # every symbol has its address in device memory


def verify(program: Program, stage: Progress = Progress.PLACED) -> None:
    """Raises InvariantError, with the number of the first invariant that `program` breaks."""
    verify_types(program)
    verify_names(program)
    for graph in program.graphs:
        verify_values(graph, program)
        verify_sections(graph)
        verify_outputs(graph, program)
        verify_updates(graph, program)
    verify_pipeline(program)
    if stage >= Progress.OPTIMIZED:
        verify_ownership(program)
        verify_training(program)
        verify_copies(program)
    if stage >= Progress.PLACED:
        verify_memory(program)
        for group in program.groups:
            verify_group(group, program)
        verify_data_parallel(program)
