"""A program that is one flat group of gradients and nothing else: what the sync paths are measured on."""

from sambasim.collectives.slices import CUT_ELEMENTS
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import DATA_PARALLEL, Axis
from sambasim.ir.program import DataParallel, GradientGroup, Optimizer, ParameterGroup, Program, RuntimeArgument
from sambasim.ir.types import ALIGNMENT_BYTES, DTYPE_BYTES, Symbol, SymbolKind, TensorType, align

_GROUP = "group_0"
_DTYPE = "float32"

ELEMENT_BYTES = DTYPE_BYTES[_DTYPE]
GRANULE_BYTES = CUT_ELEMENTS * ELEMENT_BYTES
"""A group is made of whole cuts, so its bytes are a multiple of this."""


def flat_program(numel: int) -> Program:
    """`numel` float32 gradients, rounded up to whole cuts, and a reduce operand buffer as large; no optimizer state.

    The parameters lie where the gradients do. There is no optimizer here, so what GATHER spreads are the means.
    """
    numel = align(max(numel, 1), CUT_ELEMENTS)
    size_bytes = align(numel * ELEMENT_BYTES, ALIGNMENT_BYTES)
    group = ParameterGroup(_GROUP, _DTYPE, numel, (), 0, {"parameter": 0, "gradient": 0})
    buffer = Symbol("reduce_buffer", SymbolKind.REDUCE_BUFFER, TensorType(_DTYPE, (numel,)), offset=size_bytes)
    return Program(
        name="flat",
        batch_size=1,
        symbols={buffer.name: buffer},
        training=None,
        evaluation=Graph("evaluation", (), (), (), {}),
        single=None,
        loss=None,
        per_sample_loss=False,
        optimizers=(Optimizer("sgd0", "sgd", ()),),
        groups=(group,),
        runtime_arguments=(RuntimeArgument("dp_scale_factor", 1, "replicas"),),
        data_parallel=DataParallel((GradientGroup(_GROUP, _GROUP),), buffer.name),
        device_bytes=2 * size_bytes,
        mesh=(Axis(DATA_PARALLEL, 1, at_run_time=True),),
    )
