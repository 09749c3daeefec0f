"""`hyperparam_dict`, and what is no number in it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sambasim import samba
from sambasim.errors import OptionError
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph

BATCH = [torch.ones(2, 3)]


@pytest.fixture
def loaded(tmp_path: Path) -> nn.Module:
    model = nn.Linear(3, 1)
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = session.compile(model, BATCH, optimizer, "net", config_dict={"output_folder": str(tmp_path)})
    trace_graph(model, BATCH, optimizer, pef=pef)
    return model


@pytest.mark.parametrize(
    ("value", "words", "remedy"),
    [
        ([0.1], "AP04: lr in hyperparam_dict is [0.1]", 'hyperparam_dict={"lr": …[0]}: one number, not a list'),
        ("0.1", "AP04: lr in hyperparam_dict is '0.1'", "give lr as one number, 0 or more"),
        (-0.1, "AP04: lr in hyperparam_dict is -0.1", "give lr as one number, 0 or more"),
        (float("nan"), "AP04: lr in hyperparam_dict is nan", "give lr as one number, 0 or more"),
        (object(), "AP04: lr in hyperparam_dict is a object", "give lr as one number, 0 or more"),
    ],
)
@pytest.mark.usefixtures("loaded")
def test_what_is_no_number_is_refused_with_its_line(value: object, words: str, remedy: str) -> None:
    with pytest.raises(OptionError) as caught:
        session.run(BATCH, hyperparam_dict={"lr": value})
    assert caught.value.what == words
    assert caught.value.remedy == remedy
    assert "session.run(BATCH, hyperparam_dict=" in str(caught.value.where)


@pytest.mark.usefixtures("loaded")
def test_a_tensor_of_one_number_is_one() -> None:
    rate, machine = torch.tensor(0.25), session._loaded().machine
    for number in (0.25, 0.5):  # a scheduler changes it in place
        rate.fill_(number)
        session.run(BATCH, hyperparam_dict={"lr": rate})
        assert machine.replica.hyperparameters[0]["lr"] == number


@pytest.mark.usefixtures("loaded")
def test_a_number_of_numpy_is_one() -> None:
    session.run(BATCH, hyperparam_dict={"lr": np.float32(0.25)})
    assert session._loaded().machine.replica.hyperparameters[0]["lr"] == 0.25


@pytest.mark.usefixtures("loaded")
def test_a_name_that_is_nearly_a_known_one_is_refused() -> None:
    with pytest.raises(OptionError) as caught:
        session.run(BATCH, hyperparam_dict={"momentun": 0.9})
    assert caught.value.what == "AP04: hyperparam_dict has momentun, which no optimizer of this PEF takes"
    assert "momentum" in str(caught.value.remedy)
