"""The device in bf16 against PyTorch in bf16, within 3e-3, the vendor's tolerance.

Against PyTorch in fp32, three apps allow more in their own `test`: GPT and BERT in what they predict, the feed-forward
network in its gradients. That is the format's doing, and not the device's: what the models predict has the bits of
PyTorch's own bf16, which is as far from its fp32.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.samba.session import session
from sambasim.samba.utils import assert_close, trace_graph
from tests.apps.support import SCRIPTS, App, Example

Made = tuple[nn.Module, list[Tensor]]


def _feed_forward(module: ModuleType) -> Made:
    return module.FeedForward(64, 128, 10), [torch.rand(32, 64), torch.randint(10, (32,))]


def _gpt(module: ModuleType) -> Made:
    tokens, targets = torch.randint(len(module.ALPHABET), (2, 4, 32))
    return module.GPT(32, 1), [tokens, targets]


def _bert(module: ModuleType) -> Made:
    """Without dropout: PyTorch draws other numbers for other types."""
    config = replace(module.BertConfig.from_file(str(SCRIPTS / "bert_tiny.json")), hidden_dropout_prob=0.0)
    words, length, hidden = config.vocab_size, 64, 12
    sizes = [(words, length), (length, hidden), (words, hidden)]
    return module.BertForMaskedLM(config), [torch.randint(high, (16, places)) for high, places in sizes]


@pytest.mark.parametrize(("name", "make"), [("feed_forward", _feed_forward), ("gpt", _gpt), ("bert_mlm", _bert)])
def test_the_device_computes_what_pytorch_does_in_bf16(
    name: str, make: Callable[[ModuleType], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = App(Example(name, 1, 1, (), "", ""), tmp_path).module()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(256)
    model, batch = make(module)
    narrow = copy.deepcopy(model).bfloat16()
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    config = {"output_folder": str(tmp_path), "dtype": "bf16"}
    pef = session.compile(model, batch, optimizer, name, config_dict=config)
    trace_graph(model, batch, optimizer, pef=pef)
    loss, predicted = session.run(batch, section_types=["FWD", "BCKWD"])
    narrow_loss, gold = narrow(*[one.bfloat16() if one.is_floating_point() else one for one in batch])
    narrow_loss.mean().backward()
    assert torch.equal(samba.to_torch(predicted), gold)
    # A loss is float32 on the device, and PyTorch would round it to three digits.
    assert_close(loss, model(*batch)[0], "loss")
    names = {path: symbol.name for symbol in session.program(model).symbols.values() for path in symbol.torch_names}
    for path, parameter in narrow.named_parameters():
        (gradient,) = session.get_tensors_by_name([f"{names[path]}__grad"])
        assert_close(gradient, parameter.grad, f"gradient of {path}")
