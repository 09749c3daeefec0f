"""Gradients that the app clips on the host, in one process."""

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_
from torch.nn.utils import clip_grad_norm_ as by_another_name

from sambasim import samba
from sambasim.samba import context
from sambasim.samba.checks import unclipped
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.telling import Telling
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = [torch.ones(2, 3)]


def _made(max_grad_norm: float | None) -> tuple[nn.Module, samba.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1))
    samba.from_torch_model_(model)
    return model, samba.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=max_grad_norm)


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Telling:
    telling = Telling(on_demand=True)
    monkeypatch.setattr(unclipped, "telling", telling)
    return telling


def _loaded(folder: object, max_grad_norm: float | None = None) -> tuple[nn.Module, samba.optim.SGD]:
    model, optimizer = _made(max_grad_norm)
    pef = session.compile(model, BATCH, optimizer, "net", config_dict={"output_folder": str(folder)})
    trace_graph(model, BATCH, optimizer, pef=pef)
    return model, optimizer


def test_clipping_where_there_are_no_gradients_is_found_once(telling: Telling, tmp_path: object) -> None:
    model, _ = _loaded(tmp_path)
    for _ in range(2):
        session.run(BATCH)
        clip_grad_norm_(model.parameters(), 0.5)
    (finding,) = telling.findings
    assert finding.words == "AP05: the app clips gradients on the host, and the device does not"
    assert "clip_grad_norm_(model.parameters(), 0.5)" in str(finding.where)
    assert finding.remedy.startswith("samba.optim.SGD(…, max_grad_norm=0.5), a bound of the 2-norm of all gradients")


def test_the_second_time_nothing_is_told(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Finding] = []
    monkeypatch.setattr(unclipped, "telling", SimpleNamespace(tell=told.append))
    model, _ = _loaded(tmp_path)
    for _ in range(2):
        clip_grad_norm_(model.parameters(), 0.5)
    assert len(told) == 1


ONE = torch.tensor(1.0)
ALL = "a bound of the 2-norm of all gradients together; then compile the app again"
ANEW = (
    "samba.optim.SGD(…, max_grad_norm=…), a bound to choose anew: on the device it is of the 2-norm of all gradients "
)


@pytest.mark.parametrize(
    ("clip", "remedy"),
    [
        (lambda all_, _: by_another_name(all_, 0.5), f"samba.optim.SGD(…, max_grad_norm=0.5), {ALL}"),
        (
            lambda all_, _: clip_grad_norm_(parameters=all_, max_norm=1),
            f"samba.optim.SGD(…, max_grad_norm=1.0), {ALL}",
        ),
        (lambda all_, _: clip_grad_norm_(all_, 0.5, 1), f"{ANEW}together, and no 1-norm; then compile the app again"),
        (lambda all_, _: clip_grad_norm_(all_, 0.5, math.inf), f"{ANEW}together, and no inf-norm; then compile"),
        (lambda _, one: clip_grad_norm_(one, 0.5), f"{ANEW}together, and not that of some; then compile"),
        (
            lambda all_, _: clip_grads_with_norm_(all_, 0.5, ONE),
            "samba.optim.SGD(…, max_grad_norm=0.5), a bound of the 2-norm of all gradients together, if total_norm is",
        ),
        (lambda _, one: clip_grads_with_norm_(one, 0.5, ONE), f"{ANEW}together, and not that of some; then compile"),
        (lambda all_, _: clip_grad_value_(all_, 0.5), f"{ANEW}together, and no single values; then compile"),
        (lambda all_, _: nn.utils.clip_grad_value_(all_, clip_value=0.5), f"{ANEW}together, and no single values"),
    ],
    ids=["name", "keywords", "1-norm", "inf-norm", "some", "with-norm", "some-with-norm", "value", "value-keyword"],
)
def test_every_way_to_clip_is_found_with_what_is_next_to_it_on_the_device(
    telling: Telling, tmp_path: object, clip: Callable[[list[nn.Parameter], Tensor], object], remedy: str
) -> None:
    model, _ = _loaded(tmp_path)
    session.run(BATCH)
    trained = list(model.parameters())
    with contextlib.suppress(RuntimeError):  # clip_grad_value_ of torch itself fails where there are no gradients
        clip(trained, trained[0])
    (finding,) = telling.findings
    assert finding.words == "AP05: the app clips gradients on the host, and the device does not"
    assert finding.remedy.startswith(remedy)


def test_what_is_frozen_need_not_be_clipped(telling: Telling, tmp_path: object) -> None:
    model, _ = _loaded(tmp_path)
    model.get_parameter("0.bias").requires_grad_(False)
    clip_grad_norm_(model.get_parameter("0.weight"), 0.5)
    (finding,) = telling.findings
    assert finding.remedy.startswith("samba.optim.SGD(…, max_grad_norm=0.5)")


def test_a_test_of_the_app_may_clip_on_the_host(
    telling: Telling, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = _loaded(tmp_path)
    monkeypatch.setattr(context.current(), "command", "test")
    clip_grad_norm_(model.parameters(), 0.5)
    assert not telling.findings


def test_torch_clips_and_warns_and_refuses_as_before(tmp_path: object) -> None:
    _loaded(tmp_path)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((one for one in list[Tensor]()), 0.5)
    with pytest.raises(TypeError, match="clip_value"):
        clip_grad_value_([])  # type: ignore[call-arg]  # the mistake
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_((one for one in [parameter]), 2.5) == 5
    assert torch.allclose(parameter.grad, torch.tensor([1.5, 2.0]))
    clip_grads_with_norm_(parameter, 1.25, torch.tensor(2.5))
    assert torch.allclose(parameter.grad, torch.tensor([0.75, 1.0]))
    clip_grad_value_(parameter, 0.875)
    assert torch.allclose(parameter.grad, torch.tensor([0.75, 0.875]))


def test_torch_is_given_a_list_where_the_app_gives_one(tmp_path: object, recwarn: pytest.WarningsRecorder) -> None:
    _loaded(tmp_path)
    none: list[Tensor] = []
    for nothing in (none, tuple(none), iter(none)):
        clip_grad_norm_(nothing, 1.0)
    assert not recwarn.list, "of these torch does not warn"


def test_clipping_that_has_an_effect_or_need_not_have_one_is_not(telling: Telling, tmp_path: object) -> None:
    model, optimizer = _loaded(tmp_path, max_grad_norm=0.5)
    session.run(BATCH)
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    model, _ = _loaded(tmp_path)
    clip_grad_norm_(nn.Linear(3, 1).parameters(), 0.5)
    clip_grad_norm_(model.parameters(), float("inf"))
    model(*BATCH).mean().backward()
    before = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    clip_grad_norm_(model.parameters(), 0.5)
    after = [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
    assert all(new < old for new, old in zip(after, before, strict=True)), "it clips as before"
    assert not telling.findings
