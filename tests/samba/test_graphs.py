"""PEFs of several graphs: a prompt graph and a token graph of one model, which share weights and a region."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.commands.question import predicted, predicted_alone, question_of
from sambasim.commands.run import checked_pef
from sambasim.compiler.capture.results import tensors_in
from sambasim.errors import DataError, InternalError, ModelError, OptionError, PefError, SambasimError
from sambasim.ir.types import TensorType
from sambasim.options.run import RunOptions
from sambasim.pef import read, write
from sambasim.report.inspect import contents
from sambasim.runtime.machine.communicator import single_rank
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from sambasim.simulation.sync import SyncPath
from tests.samba.harness import PefOf, equal, imported, layer_batch, refused, seeded, with_sgd

BATCH = 2


class Summing(nn.Module):
    """Words [batch, n, 8] and the sum so far [batch, 64], or None, to logits [batch, 8] and the sum."""

    output_tensors: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, words: Tensor, so_far: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        total = torch.tanh(self.layer(words)).sum(1)
        total = total if so_far is None else total + so_far
        return {"logits": self.head(total) * scale, "total": total}


def words(number: int, count: int) -> Any:
    values = torch.randn(BATCH, count, 8, generator=torch.Generator().manual_seed(number))
    return samba.from_torch_tensor(values, name="words", batch_dim=0)


def so_far() -> Any:
    return samba.from_torch_tensor(torch.zeros(BATCH, 64), name="so_far", batch_dim=0, region_name="sum")


def graph_of(*arguments: Any, **keywords: Any) -> Any:
    return imported("samba.graph").FwdGraph(*arguments, **keywords)


def add_graphs(model: nn.Module, token: str = "token", count: int = 3) -> None:
    """As an app does, at the compile and in a run."""
    inputs = [words(0, count), None]
    imported("samba.graph")
    outputs = model(*inputs)
    outputs["total"].sn_region_name = "sum"
    session.add_graph(graph_of(inputs, outputs, "prompt"))
    named = {"words": words(0, 1), "so_far": so_far()}
    outputs = model(**named, scale=2.0)
    outputs["logits"].sn_name = "next_logits"
    total = samba.from_torch_tensor(outputs["total"], region_name="sum")
    session.add_graph(graph_of(named, (outputs["logits"], total), name=token))


def make() -> Any:
    return samba.from_torch_model_(seeded(Summing))


def compiled_once(name: str, folder: Path, add: Any) -> str:
    path = folder / name / f"{name}.pef"
    if not path.exists():
        add()
        options: Any = {"config_dict": {"output_folder": str(folder)}, "pef_metadata": {"of": "app"}}
        written = session.compile_multigraph(name=name, **options, enable_hypersection=True, inference=True)
        assert written == str(path)
        assert {one.name for one in folder.iterdir()} <= {"sums", "forms"}
    return str(path)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def pef(app: None, folder: Path) -> str:
    return compiled_once("sums", folder, lambda: add_graphs(make()))


@pytest.fixture
def model(pef: str) -> Any:
    made = make()
    add_graphs(made)
    session.init_multigraph_runtime(pef)
    return made


def test_a_run_reads_what_the_region_holds(model: Any) -> None:
    plain = seeded(Summing)
    expected = plain(samba.to_torch(words(1, 3)))
    logits, total = session.run(input_tensors=[words(1, 3)], graph_name="prompt")
    assert equal(logits, expected["logits"])
    assert equal(total, expected["total"])
    forms: list[Any] = [lambda one: [one], lambda one: {"words": one}, samba.to_torch]
    for number, as_given in enumerate(forms, 2):
        given = samba.to_torch(words(number, 1))
        expected = plain(given, expected["total"], 2.0)
        logits, total = session.run(input_tensors=as_given(words(number, 1)), graph_name="token")
        assert equal(logits, expected["logits"])
        assert equal(total, expected["total"])
        total.zero_()  # the app's tensor is not the device's
    fetched, first = session.get_tensors_by_name(["next_logits", "summing__layer__weight"])
    assert equal(fetched, expected["logits"])
    assert equal(first, plain.layer.weight)
    # A region is also written by an input.
    session.run([words(5, 1), torch.ones(BATCH, 64)], graph_name="token")
    logits, _ = session.run(words(6, 1), graph_name="token")
    before = plain(samba.to_torch(words(5, 1)), torch.ones(BATCH, 64))["total"]
    assert equal(logits, plain(samba.to_torch(words(6, 1)), before, 2.0)["logits"])
    assert [one.sn_name for one in model.output_tensors] == [
        f"summing__evaluation__outputs__{index}" for index in (0, 1)
    ]


def test_calls_are_found_after_one_that_was_interrupted(pef: str) -> None:
    class Interrupted(nn.Module):
        def forward(self, part: nn.Module) -> None:
            raise KeyboardInterrupt

    imported("samba.graph")
    with pytest.raises(KeyboardInterrupt):
        Interrupted()(nn.Identity())
    add_graphs(make())


def test_outputs_of_another_graph_are_refused(model: Any) -> None:
    session.run(words(1, 3), graph_name="prompt")
    with refused(OptionError, "output_tensors are of another graph than the one that runs", "leave output_tensors out"):
        session.run(words(1, 1), model.output_tensors, graph_name="token")
    logits, _ = session.run(words(1, 1), model.output_tensors, graph_name="token")  # those of the graph chosen last
    assert logits.shape == (BATCH, 8)


def test_before_a_run_a_region_holds_what_was_traced(model: Any) -> None:
    logits, _ = session.run(words(1, 1), graph_name="token")
    assert equal(logits, seeded(Summing)(samba.to_torch(words(1, 1)), torch.zeros(BATCH, 64), 2.0)["logits"])


def test_graphs_of_a_model_have_one_set_of_weights(model: Any) -> None:
    with torch.no_grad():
        model.head.bias.add_(1.0)
    session.to_device(model)
    for name, *inputs, scale in ("prompt", words(1, 3), 1.0), ("token", words(1, 1), so_far(), 2.0):
        logits, _ = session.run(inputs, graph_name=name)
        assert equal(logits, model(*inputs, scale=scale)["logits"])
    session.ctx.set_tensors({"summing__head__bias": torch.zeros(8)})
    session.run(words(1, 3), graph_name="prompt")
    assert equal(model.head.bias.sn_data, torch.zeros(8))
    session.to_cpu(model)
    assert equal(model.head.bias, torch.zeros(8))


def test_the_file_lists_the_graphs_and_stores_weights_once(pef: str) -> None:
    path = Path(pef)
    document = read(path)
    assert [*document.graphs] == ["prompt", "token"]
    assert all(one.checked and one.metadata["of"] == "app" for one in document.graphs.values())
    names = {f"summing__{layer}__{tensor}" for layer in ("layer", "head") for tensor in ("weight", "bias")}
    assert document.stored.keys() == names
    assert [graph.name for graph in contents(path, document).graphs] == ["prompt", "token"]
    token, name = document.graphs["token"], "summing__head__bias"
    symbols = {**token.program.symbols, name: replace(token.program.symbols[name], type=TensorType("float32", (9,)))}
    other = replace(token, program=replace(token.program, symbols=symbols))
    with pytest.raises(InternalError, match=r"bias is float32\[8\], and float32\[9\] in the graph token"):
        _ = replace(document, graphs={**document.graphs, "token": other}).stored
    with pytest.raises(InternalError, match="the graph token has no weight head, which it is to have of its own"):
        write(path, document.only("token", own=("head",)), {})
    with pytest.raises(OptionError, match="the PEF sums has several graphs, and sambasim run takes one"):
        checked_pef(RunOptions(pef=pef), path.parent, single_rank("here"), ["sambasim", "run"])
    predictions = predicted(question_of(pef, batch_sizes="2,4"), lambda phase: None)
    each = [(one.program.name, one.steps[SyncPath.RDU][0].batch_size) for one in predictions]
    assert each == [(f"sums, graph {graph}", size) for graph in ("prompt", "token") for size in (2, 4)]
    with pytest.raises(OptionError, match="has several graphs, and this command predicts one"):
        predicted_alone(question_of(pef), lambda phase: None)


def compile_nothing() -> None:
    session.reset()
    session.compile_multigraph()


ERRORS: list[tuple[type[SambasimError], str, str, Any]] = [
    (
        OptionError,
        "session.run needs the name of a graph: prompt, token are loaded",
        "prompt",
        lambda: session.run(words(0, 3)),
    ),
    (
        OptionError,
        "no graph tokens is loaded",
        "did you mean token",
        lambda: session.run(words(0, 1), graph_name="tokens"),
    ),
    (DataError, "the input words of the PEF has no tensor", "", lambda: session.run(graph_name="token")),
    (OptionError, "two graphs are called prompt", "name=", lambda: [*map(add_graphs, (make(), make()))]),
    (OptionError, "add_graph takes a graph", "FwdGraph", lambda: session.add_graph(make())),
    (
        OptionError,
        "predicts, and trains nothing",
        "session.compile",
        lambda: session.compile_multigraph(inference=False),
    ),
    (OptionError, "there are no graphs", "add_graph", compile_nothing),
]


@pytest.mark.parametrize(("kind", "what", "remedy", "call"), ERRORS)
def test_calls_that_cannot_be_meant_are_refused(model: Any, kind: Any, what: str, remedy: str, call: Any) -> None:
    with pytest.raises(kind, match=what) as caught:
        call()
    assert remedy in str(caught.value.remedy)


def test_a_pef_is_loaded_as_it_was_compiled(pef: str, load: Any, pef_of: PefOf) -> None:
    inputs = [words(0, 3)]
    with refused(OptionError, "sums.pef is a PEF of the graphs prompt, token", "init_multigraph_runtime"):
        trace_graph(make(), inputs, pef=pef)
    init = partial(session.init_multigraph_runtime, pef=pef)
    add_graphs(make(), count=4)
    with refused(PefError, r"words is input float32\[2, 3, 8\] in the PEF, and input float32\[2, 4, 8\] in the model"):
        init()
    add_graphs(make(), token="tokens")
    with refused(OptionError, "sums.pef has no graph tokens", "token"):
        init()
    of_one = pef_of(partial(with_sgd, nn.Identity), layer_batch(), inference=True)
    with refused(OptionError, "is a PEF of one graph", "trace_graph"):
        session.init_multigraph_runtime(of_one)


def outside() -> Any:
    """What no call returned."""
    return torch.zeros(BATCH, 8)


CALLS: list[tuple[type[SambasimError], str, Any]] = [
    (ModelError, "the outputs of the graph g are not what a call of a module returned", lambda call, x: (x, outside())),
    (ModelError, "are not what a call", lambda call, x: (x, call(x)["logits"] * 2)),
    (ModelError, "the outputs of a graph must be tensors", lambda call, x: (x, None)),
    (DataError, "was called with words, which is not among", lambda call, x: (outside(), call(x))),
    (DataError, "was called with scale, which is a Three", lambda call, x: (x, call(x, None, Three()))),
]


class Three:
    def __rmul__(self, other: Tensor) -> Tensor:
        return other * 3


@pytest.mark.parametrize(("kind", "what", "graph"), CALLS)
def test_graphs_that_do_not_fit_a_call_are_refused(app: None, kind: Any, what: str, graph: Any) -> None:
    imported("samba.graph")
    with refused(kind, what):
        graph_of(*graph(make(), words(0, 3)), "g")


class Forms(nn.Module):
    """Takes its arguments in many forms. Constants depend on the number of words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)

    def forward(self, words: Tensor, *more: Any, place: Any = None, past: Any = (), **others: Any) -> Any:
        words = words + torch.arange(words.shape[1])[:, None]
        for one in more:
            words = words + one
        for key, value in past:
            words = words + key.sum(0) * value
        if others:
            words = words * others["mask"]
        at = torch.as_tensor(place or 0) if not isinstance(place, Tensor) else place
        return [(self.linear(words), words), words.sum() if place is None else words.index_select(1, at.view(1))]


def add_forms() -> dict[str, Any]:
    """Adds graphs of two models of one class. Returns the model and what it was called with, by the graph."""
    imported("samba.graph")
    first, second = (samba.from_torch_model_(Forms(width)) for width in (4, 8))
    mask = samba.SambaTensor(torch.rand(3, 8), name="mask")
    place = samba.SambaTensor(torch.tensor(2), name="at")
    past: Any = [
        tuple(samba.SambaTensor(torch.rand(5, 3, 8), name=f"{name}{layer}") for name in "kv") for layer in (0, 1)
    ]
    past = [(key, value[0]) for key, value in past]
    calls: dict[str, Any] = {
        "by_place": (first, (words(0, 3), samba.SambaTensor(torch.rand(BATCH, 1, 8), name="plus")), {}),
        "by_name": (first, (words(0, 2),), {"place": 1}),
        "nested": (second, (words(0, 3),), {"past": past, "mask": mask, "place": place}),
    }
    for name, (model, args, keywords) in calls.items():
        outputs = model(*args, **keywords)
        chosen = outputs if name != "by_name" else [outputs[1], outputs[0][0]]
        inputs = [*args, *keywords.values()]
        session.add_graph(graph_of([one for one in inputs if not isinstance(one, int)], chosen, name))
    return calls


def test_many_forms_of_calls(app: None, folder: Path) -> None:
    torch.manual_seed(0)
    pef = compiled_once("forms", folder, add_forms)
    torch.manual_seed(1)
    calls = add_forms()
    session.init_multigraph_runtime(pef)
    for name, (model, args, keywords) in calls.items():
        outputs = model(*args, **keywords)
        tensors = {"words": args[0], **keywords} if name == "nested" else args
        chosen = [*outputs[0], outputs[1]] if name != "by_name" else [outputs[1], outputs[0][0]]
        assert all(map(equal, session.run(tensors, graph_name=name), chosen)), name
        # Without names, in the order of the graph's inputs, which may be another than that of the call.
        listed = samba.to_torch(tensors_in([*args, *keywords.values()]))
        assert all(map(equal, session.run(listed, graph_name=name), chosen)), name
    with refused(DataError, "a tensor fits no place", r"words.*, each with its name="):
        session.run([*listed, None], graph_name="nested")
