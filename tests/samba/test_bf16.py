"""`--dtype bf16` in one process: what is stored, what the app sees of it, and how optimizer steps round."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import OptionError
from sambasim.ir.program import ROUNDING_SEED, Program
from sambasim.ir.types import SymbolKind
from sambasim.pef import read
from sambasim.samba import process
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from sambasim.samba.utils.argparser import SambaConfig
from tests.samba.harness import Made, PefOf, compiled

BATCH, WORDS = 512, 3
BF16 = torch.bfloat16


class Tagger(nn.Module):
    """The loss of each word's tag, and the scores."""

    output_tensors: tuple[samba.SambaTensor, ...]

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.norm = nn.LayerNorm(8)
        self.scores = nn.Linear(8, 4)
        self.scale = torch.full((8,), 1 / 3)

    def forward(self, word: Tensor, x: Tensor, tag: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.table(word) + x * self.scale)
        # These are of the type that is torch's default, and a linear layer takes one type only.
        place = torch.arange(8) / 8 + torch.zeros(8) + torch.where(word[:, None] > 0, 0.5, 0.0)
        scores = self.scores(hidden + place)
        return nn.functional.cross_entropy(scores, tag), scores


def _tagger() -> Tagger:
    torch.manual_seed(0)
    model = Tagger()
    samba.from_torch_model_(model)
    return model


def _inputs(tag_type: torch.dtype = torch.int64, number: int = 0) -> tuple[samba.SambaTensor, ...]:
    generator = torch.Generator().manual_seed(number)
    return (
        samba.from_torch_tensor(torch.randint(WORDS, (BATCH,), generator=generator), name="word", batch_dim=0),
        samba.from_torch_tensor(torch.randn(BATCH, 8, generator=generator), name="x", batch_dim=0),
        samba.from_torch_tensor(torch.randint(4, (BATCH,), generator=generator).to(tag_type), name="tag", batch_dim=0),
    )


def _adam(model: nn.Module) -> samba.optim.AdamW:
    return samba.optim.AdamW(model.parameters(), lr=0.01)


def _made() -> Made:
    model = _tagger()
    return model, _adam(model)


@pytest.fixture
def pef(pef_of: PefOf) -> str:
    return pef_of(_made, _inputs(), dtype="bf16")


@pytest.fixture
def rounding_pef(pef_of: PefOf) -> str:
    return pef_of(_made, _inputs(), dtype="bf16", enable_stoc_rounding=True)


def _loaded(pef: str, seed: int = 0) -> tuple[Tagger, samba.optim.AdamW]:
    model = _tagger()
    optimizer = _adam(model)
    torch.manual_seed(seed)
    trace_graph(model, _inputs(), optimizer, pef=pef)
    return model, optimizer


def _rounded(model: Tagger) -> Tagger:
    """The model on the host with the weights that the device has."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def _floats(program: Program, *kinds: SymbolKind) -> set[str]:
    types = [symbol.type.dtype for symbol in program.symbols.values() if symbol.kind in kinds]
    return {dtype for dtype in types if "float" in dtype}


def test_the_pef_is_one_of_bfloat16_under_the_same_names(pef: str, pef_of: PefOf) -> None:
    program = read(Path(pef)).program
    for kind in (SymbolKind.PARAMETER, SymbolKind.GRADIENT, SymbolKind.OPTIMIZER_STATE, SymbolKind.INPUT):
        assert _floats(program, kind) == {"bfloat16"}
    assert _floats(program, SymbolKind.CONSTANT, SymbolKind.ACCUMULATION_GROUP) == {"bfloat16"}
    assert program.symbols["tagger__loss"].type.dtype == "float32"
    assert program.symbols["tagger__outputs__0"].type.dtype == "bfloat16"
    assert read(Path(pef)).compile_options["dtype"] == "bf16"
    plain = read(Path(pef_of(_made, _inputs()))).program
    assert plain.symbols.keys() == program.symbols.keys()
    assert _floats(plain, *SymbolKind) == {"float32"}


def test_outputs_are_bf16_and_the_loss_is_fp32(pef: str) -> None:
    model, _ = _loaded(pef)
    loss, scores = session.run(_inputs(), model.output_tensors)
    assert (loss.dtype, scores.dtype) == (torch.float32, BF16)
    assert scores.numpy().dtype == np.float32
    assert np.array_equal(scores.numpy(), scores.float().numpy())
    assert loss.numpy().dtype == np.float32
    gold_loss, gold_scores = _rounded(_tagger())(*(samba.to_torch(tensor) for tensor in _inputs()))
    samba.utils.assert_close(loss, gold_loss, "loss")
    samba.utils.assert_close(scores, gold_scores, "scores", threshold=1e-2)


def test_gradients_that_add_up_many_samples_do_so_in_float32(pef: str) -> None:
    """By torch's kernels of bfloat16, a sum of 170 gradients is off by some percent."""
    model, _ = _loaded(pef)
    session.run(_inputs(), section_types=["FWD", "BCKWD"])
    (found,) = session.get_tensors_by_name(["tagger__norm__weight__grad"])
    gold = _rounded(model)
    gold(*(samba.to_torch(tensor) for tensor in _inputs()))[0].backward()
    expected = gold.norm.weight.grad
    assert expected is not None
    assert float((found.torch().double() - expected.double()).abs().max() / expected.double().abs().max()) < 0.01


def test_weights_go_to_the_device_rounded_and_come_back_as_they_are(pef: str) -> None:
    model, optimizer = _loaded(pef)
    session.to_cpu(model)
    for own, host in zip(_tagger().parameters(), model.parameters(), strict=True):
        assert host.dtype is torch.float32
        assert torch.equal(host, own.bfloat16().float())
    session.run(_inputs())
    session.to_cpu(model)
    state = optimizer.state[model.scores.weight]
    assert state["exp_avg"].dtype is torch.float32
    names = ["tagger__scores__weight", "tagger__scores__weight__adamw0__exp_avg"]
    before = [tensor.clone() for tensor in session.get_tensors_by_name(names)]
    assert torch.equal(state["exp_avg"], before[1].float())
    session.to_device(model)
    assert all(map(torch.equal, session.get_tensors_by_name(names), before))


def test_labels_may_be_int16_when_it_is_compiled_and_when_it_runs(pef: str, tmp_path: Path) -> None:
    losses = []
    for path in (pef, compiled(_made(), _inputs(torch.int16), tmp_path, "tagger", dtype="bf16")):
        for tag_type in (torch.int16, torch.int64):
            model, _ = _loaded(path)
            (loss,) = session.run(_inputs(tag_type), model.output_tensors[0])
            losses.append(loss.item())
    assert len(set(losses)) == 1
    assert losses[0] > 0


def test_a_dtype_that_is_not_the_pefs_is_refused_and_none_takes_the_pefs(pef: str) -> None:
    process.current().arguments = SambaConfig("run", pef=pef)
    _loaded(pef)
    process.current().arguments = SambaConfig("run", pef=pef, dtype="bf16")
    _loaded(pef)
    process.current().arguments = SambaConfig("run", pef=pef, dtype="fp32")
    with pytest.raises(OptionError, match="--dtype is fp32, and the PEF net was compiled with --dtype bf16") as error:
        _loaded(pef)
    assert error.value.remedy == "leave out --dtype, or compile again with --dtype fp32"


def _trained(pef: str, seed: int) -> list[Tensor]:
    model, _ = _loaded(pef, seed)
    for number in range(3):
        session.run(_inputs(number=number))
    session.to_cpu(model)
    return [parameter.detach().clone() for parameter in model.parameters()]


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_the_apps_seed_decides_how_steps_are_rounded(pef: str, rounding_pef: str) -> None:
    assert [argument.name for argument in read(Path(rounding_pef)).program.runtime_arguments].count(ROUNDING_SEED) == 1
    first = _trained(rounding_pef, seed=1)
    assert _alike(first, _trained(rounding_pef, seed=1))
    assert not _alike(first, _trained(rounding_pef, seed=2))
    to_nearest = _trained(pef, seed=1)
    assert not _alike(first, to_nearest)
    assert _alike(to_nearest, _trained(pef, seed=2))


def test_a_checkpoint_goes_on_with_the_draws_that_would_have_come(rounding_pef: str) -> None:
    expected = _trained(rounding_pef, seed=1)
    model, optimizer = _loaded(rounding_pef, seed=1)
    for number in range(2):
        session.run(_inputs(number=number))
    session.to_cpu(model)
    weights, state = model.state_dict(), optimizer.state_dict()
    resumed = _tagger()
    again = _adam(resumed)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    torch.manual_seed(1)
    trace_graph(resumed, _inputs(), again, pef=rounding_pef)
    session.run(_inputs(number=2))
    session.to_cpu(resumed)
    assert _alike(list(resumed.parameters()), expected)
