"""A small data-parallel logistic regression, written by hand, and a PEF of it."""

from dataclasses import replace
from pathlib import Path

import torch

from sambasim.ir.graph import Graph, Node, Output, Ref, Section, SectionKind, SourceLine, TorchConstant
from sambasim.ir.mesh import Axis
from sambasim.ir.program import Member, Optimizer, ParameterGroup, Program, RuntimeArgument
from sambasim.ir.types import Symbol, SymbolKind, TensorType
from sambasim.pef import PefDocument, write
from sambasim.pef.document import FORMAT, VERSION, WRITER, PefGraph

BATCH, FEATURES, CLASSES = 4, 3, 2
GROUP_BYTES = 128 * 4
WEIGHT, BIAS = "logreg__lin_layer__weight", "logreg__lin_layer__bias"
WRAPPER = "$OPT_dp_accum_group_" + "a" * 40
LINE = SourceLine("logreg.py", 7, "return self.lin_layer(x)")


def _f32(*shape: int) -> TensorType:
    return TensorType("float32", shape)


def _symbols() -> tuple[Symbol, ...]:
    kind = SymbolKind
    addresses = {"": 512, "__grad": 1024, "__sgd0__momentum": 1536}
    kinds = {"": kind.PARAMETER, "__grad": kind.GRADIENT, "__sgd0__momentum": kind.OPTIMIZER_STATE}
    types = {WEIGHT: _f32(CLASSES, FEATURES), BIAS: _f32(CLASSES)}
    named = {WEIGHT: ("lin_layer.weight",), BIAS: ("lin_layer.bias",)}
    members = [
        Symbol(f"{name}{suffix}", kinds[suffix], type_, address + start, () if suffix else named[name])
        for suffix, address in addresses.items()
        for (name, type_), start in zip(types.items(), (0, 4 * 64), strict=True)
    ]
    return (
        Symbol("x", kind.INPUT, _f32(BATCH, FEATURES), 0),
        Symbol("target", kind.INPUT, TensorType("int64", (BATCH,)), 4096, exclusive_bound=CLASSES),
        Symbol("loss__grad", kind.TANGENT, _f32()),
        *members,
        Symbol("logreg__steps", kind.BUFFER, TensorType("int64", ()), 4608, ("steps",)),
        Symbol("logreg__mask", kind.CONSTANT, TensorType("bool", (FEATURES,)), 5120),
        Symbol("logreg__nothing", kind.CONSTANT, TensorType("bfloat16", (0, 3)), 5632),
        Symbol(WRAPPER, kind.ACCUMULATION_GROUP, _f32(128), 1024),
        Symbol("accum_dummy_0_reduce_buf", kind.REDUCE_BUFFER, _f32(192), 2048),
        Symbol("loss", kind.OUTPUT, _f32()),
        Symbol("logits", kind.OUTPUT, _f32(BATCH, CLASSES)),
    )


_AXIS = (("axis", "dp"),)
_MEAN = (*_AXIS, ("op", "mean"), ("order", "tree"))
_SUM = (*_AXIS, ("op", "sum"), ("order", "tree"))


def _training() -> Graph:
    module, ref = "lin_layer", Ref
    nodes = (
        Node("t", "aten.t.default", (ref(WEIGHT),), (), ("t",), module, LINE),
        Node("addmm", "aten.addmm.default", (ref(BIAS), ref("x"), ref("t")), (), ("addmm",), module, LINE),
        Node("log_softmax", "aten._log_softmax.default", (ref("addmm"), 1, False), (), ("log_softmax",)),
        Node("nll", "aten.nll_loss_forward.default",
             (ref("log_softmax"), ref("target"), None, 1, -100), (), ("nll", "n")),
        Node("nll_back", "aten.nll_loss_backward.default",
             (ref("loss__grad"), ref("log_softmax"), ref("target"), None, 1, -100, ref("n")), (), ("d_log",)),
        Node("softmax_back", "aten._log_softmax_backward_data.default",
             (ref("d_log"), ref("log_softmax"), 1, TorchConstant("dtype", "float32")), (), ("d_addmm",)),
        Node("d_t", "aten.t.default", (ref("d_addmm"),), (), ("d_t",), module, LINE),
        Node("mm", "aten.mm.default", (ref("d_t"), ref("x")), (), ("d_weight",), module, LINE),
        Node("sum", "aten.sum.dim_IntList",
             (ref("d_addmm"), (0,), False), (("dtype", None),), ("d_bias",), module, LINE),
        Node("reduce", "comm.reduce_scatter", ("group0",), _MEAN),
        Node("sums", "opt.square_sums", (("group0",),), (), ("sums",)),
        Node("all_sums", "comm.all_reduce", (ref("sums"),), _SUM, ("all_sums",)),
        Node("norm", "opt.total_norm", (ref("all_sums"),), (), ("norm",)),
        Node("sgd", "opt.sgd", ("group0", ref("norm"))),
        Node("gather", "comm.all_gather", ("group0",), _AXIS),
    )  # fmt: skip
    kind = SectionKind
    stops = ((kind.FWD, 4), (kind.BCKWD, 9), (kind.REDUCE, 10), (kind.GRADNORM, 13), (kind.OPT, 14), (kind.GATHER, 15))
    starts = (0, *(stop for _, stop in stops))
    sections = tuple(
        Section(index, kind_, f"logreg__{kind_.lower()}_{index}", starts[index], stop)
        for index, (kind_, stop) in enumerate(stops)
    )
    values = {
        "t": _f32(FEATURES, CLASSES), "addmm": _f32(BATCH, CLASSES), "log_softmax": _f32(BATCH, CLASSES), "nll": _f32(),
        "n": _f32(), "d_log": _f32(BATCH, CLASSES), "d_addmm": _f32(BATCH, CLASSES), "d_t": _f32(CLASSES, BATCH),
        "d_weight": _f32(CLASSES, FEATURES), "d_bias": _f32(CLASSES),
        "sums": TensorType("float64", (2,)), "all_sums": TensorType("float64", (2,)), "norm": TensorType("float64", ()),
    }  # fmt: skip
    outputs = (Output("nll", "loss"), Output("d_weight", f"{WEIGHT}__grad"), Output("d_bias", f"{BIAS}__grad"))
    return Graph("training", ("x", "target", "loss__grad", WEIGHT, BIAS), nodes, outputs, values, sections)


def _evaluation() -> Graph:
    inputs, section = ("x", WEIGHT, BIAS), Section(0, SectionKind.FWD, "logreg__fwd_0", 0, 1)
    node = Node("linear", "aten.linear.default", tuple(map(Ref, inputs)), (), ("linear",), "lin_layer", LINE)
    values = {"linear": _f32(BATCH, CLASSES)}
    return Graph("evaluation", inputs, (node,), (Output("linear", "logits"),), values, (section,))


def sample_program() -> Program:
    members = (Member(WEIGHT, f"{WEIGHT}__grad", 0, 6, 0), Member(BIAS, f"{BIAS}__grad", 64, 2, 1))
    regions = {"parameter": 512, "gradient": 1024, "momentum": 1536}
    group = ParameterGroup("group0", "float32", 128, members, 0, regions, wrapper=WRAPPER)
    return Program(
        name="logreg",
        batch_size=BATCH,
        symbols={symbol.name: symbol for symbol in _symbols()},
        training=_training(),
        evaluation=_evaluation(),
        single=None,
        loss="loss",
        per_sample_loss=False,
        optimizers=(Optimizer("sgd0", "sgd", ("momentum",)),),
        groups=(group,),
        runtime_arguments=(
            RuntimeArgument("sgd0__lr", 0.05, "learning rate"),
            RuntimeArgument("sgd0__max_grad_norm", float("inf"), "largest norm of all gradients"),
            RuntimeArgument("dp_scale_factor", 1, "number of replicas"),
        ),
        device_bytes=6144,
        mesh=(Axis("dp", 2, at_run_time=True),),
        reduce_buffer="accum_dummy_0_reduce_buf",
        zero=1,
    )


def inference_program() -> Program:
    """The evaluation graph alone, with no more symbols than it needs."""
    program = sample_program()
    kinds = {SymbolKind.INPUT, SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.CONSTANT, SymbolKind.OUTPUT}
    symbols = {name: symbol for name, symbol in program.symbols.items() if symbol.kind in kinds}
    symbols[BIAS] = replace(symbols[BIAS], offset=1024)  # on its own, and no longer the second of a group
    program = replace(program, symbols=symbols, training=None, loss=None, optimizers=(), groups=())
    return replace(program, runtime_arguments=(), mesh=(), reduce_buffer=None, zero=0)


def sample_document() -> PefDocument:
    metadata = {"torch": "2.13.0", "model": "LogReg(\n  (lin_layer): Linear()\n) naïve"}
    program = sample_program()
    return PefDocument(
        FORMAT,
        VERSION,
        WRITER,
        weights_sha256="",
        data_source={"target": "digits.py:dataset", "arguments": {"split": 0.2, "seed": None}},
        compile_options={"batch_size": BATCH, "data_parallel": True, "world_size": 2},
        training_defaults={"epochs": 3},
        graphs={program.name: PefGraph(program, metadata)},
    )


def sample_weights() -> dict[str, torch.Tensor]:
    return {
        "logreg__lin_layer__weight": torch.arange(6.0).view(CLASSES, FEATURES),
        "logreg__lin_layer__bias": torch.tensor([0.5, -0.0]),
        "logreg__steps": torch.tensor(2**60),
        "logreg__mask": torch.tensor([True, False, True]),
        "logreg__nothing": torch.zeros(0, 3, dtype=torch.bfloat16),
    }


def write_sample(folder: Path) -> Path:
    path = folder / "logreg.pef"
    write(path, sample_document(), sample_weights())
    return path
