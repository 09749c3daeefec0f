"""PEFs of several graphs: a prompt graph and a token graph of one model, which share weights and a region."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.samba.session import session
from tests.samba.harness import equal, imported, seeded

BATCH = 2


class Summing(nn.Module):
    """Words [batch, n, 8] and the sum so far [batch, 64], or None, to logits [batch, 8] and the sum."""

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


def add_graphs(model: nn.Module, token_name: str = "token", count: int = 3) -> None:
    """As an app does, at the compile and in a run."""
    graph_of = imported("samba.graph").FwdGraph
    prompt = [words(0, count), None]
    outputs = model(*prompt)
    outputs["total"].sn_region_name = "sum"
    session.add_graph(graph_of(prompt, outputs, "prompt"))
    token = {"words": words(0, 1), "so_far": so_far()}
    outputs = model(**token, scale=2.0)
    outputs["total"].region_name = "sum"
    outputs["logits"].sn_name = "next_logits"
    session.add_graph(graph_of(token, (outputs["logits"], outputs["total"]), name=token_name))


def make() -> Any:
    return samba.from_torch_model_(seeded(Summing))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def pef(app: None, folder: Path) -> str:
    """Compiled once."""
    if not (path := folder / "sums" / "sums.pef").exists():
        add_graphs(make())
        config = {"output_folder": str(folder), "inference": True}
        assert session.compile_multigraph(
            name="sums", config_dict=config, pef_metadata={"of": "app"}, enable_hypersection=True, inference=True
        ) == str(path)
    return str(path)


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
    for number in (2, 3):
        expected = plain(samba.to_torch(words(number, 1)), expected["total"], 2.0)
        logits, total = session.run(input_tensors=[words(number, 1)], graph_name="token")
        assert equal(logits, expected["logits"])
        assert equal(total, expected["total"])
        total.zero_()  # the app's tensor is not the device's
    (fetched,) = session.get_tensors_by_name(["next_logits"])
    assert equal(fetched, expected["logits"])
