"""Hypothesis strategies: any program that the manifest can say, valid or not."""

from hypothesis import strategies as st

from sambasim.ir.graph import TORCH_CONSTANTS, Graph, Node, Output, Ref, Section, SectionKind, SourceLine, TorchConstant
from sambasim.ir.mesh import Axis
from sambasim.ir.program import (
    DataParallel,
    GradientGroup,
    Member,
    Optimizer,
    ParameterGroup,
    Program,
    RuntimeArgument,
)
from sambasim.ir.types import DTYPE_BYTES, Symbol, SymbolKind, TensorType
from sambasim.pef import PefDocument

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
size = st.integers(0, 2**46)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text)
constants = st.sampled_from(
    [TorchConstant(kind, name) for kind, names in TORCH_CONSTANTS.items() for name in sorted(names)]
)
arguments = st.recursive(
    st.one_of(scalars, st.builds(Ref, text), constants),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
json_objects = st.dictionaries(
    text,
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), text),
        lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(text, inner, max_size=2)),
        max_leaves=4,
    ),
    max_size=3,
)
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


def _few(items: st.SearchStrategy, most: int = 2) -> st.SearchStrategy:
    return st.lists(items, max_size=most).map(tuple)


types = st.builds(TensorType, st.sampled_from(sorted(DTYPE_BYTES)), _few(size))
nodes = st.builds(
    Node,
    name=text,
    operator=text,
    args=_few(arguments, 3),
    kwargs=_few(st.tuples(text, arguments)),
    results=_few(st.none() | text),
    module=text,
    source=st.none() | st.builds(SourceLine, text, st.integers(), text),
)


def _numbered(rows: list[tuple[SectionKind, str, int, int]]) -> tuple[Section, ...]:
    return tuple(Section(index, *row) for index, row in enumerate(rows))


graphs = st.builds(
    Graph,
    name=text,
    inputs=_few(text),
    nodes=_few(nodes, 3),
    outputs=_few(st.builds(Output, text, text)),
    values=st.dictionaries(text, types, max_size=2),
    sections=st.lists(st.tuples(st.sampled_from(SectionKind), text, size, size), max_size=2).map(_numbered),
)
symbols = st.builds(
    Symbol,
    name=text,
    kind=st.sampled_from(SymbolKind),
    type=types,
    offset=st.none() | size,
    torch_names=_few(text),
    exclusive_bound=st.none() | st.integers(),
)
optimizers = st.lists(
    st.builds(Optimizer, text, st.sampled_from(["sgd", "adam", "adamw"]), _few(text)), min_size=1, max_size=2
).map(tuple)
groups = st.builds(
    ParameterGroup,
    name=text,
    dtype=text,
    numel=size,
    members=_few(st.builds(Member, text, text, size, size)),
    optimizer=st.just(0),
    regions=st.dictionaries(text, size, max_size=3),
)
programs = st.builds(
    Program,
    name=st.from_regex(r"[a-z][a-z0-9_ .-]{0,5}", fullmatch=True),
    batch_size=size,
    symbols=st.lists(symbols, max_size=3).map(lambda rows: {row.name: row for row in rows}),
    training=st.none() | graphs,
    evaluation=graphs,
    single=st.none() | graphs,
    loss=st.none() | text,
    per_sample_loss=st.booleans(),
    optimizers=optimizers,
    groups=_few(groups),
    runtime_arguments=_few(
        st.builds(RuntimeArgument, text, st.one_of(st.booleans(), st.integers(), st.floats()), text)
    ),
    data_parallel=st.none() | st.builds(DataParallel, _few(st.builds(GradientGroup, text, text)), text),
    device_bytes=size,
    mesh=_few(st.builds(Axis, text, size, st.booleans())),
)
documents = st.builds(
    PefDocument,
    program=programs,
    data_source=json_objects,
    compile_options=json_objects,
    training_defaults=json_objects,
    metadata=st.dictionaries(text, text, max_size=3),
    digest=digests,
    weights_sha256=digests,
)
