"""The memory of a training step by PyTorch's own accounting: the eager model runs on tensors without memory, while
hooks and a dispatch mode note every storage."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sambasim.commands.variants import training_shapes
from sambasim.compiler.capture.step import both_steps
from sambasim.compiler.capture.tensors import default_type, inputs_in
from sambasim.compiler.front import build_model, example_of_one, model_of_shapes
from sambasim.optimizers import OPTIMIZERS
from sambasim.options.compile import CompileOptions
from sambasim.simulation.memory import DTYPES, Choice

# PyTorch on a CPU keeps masks of dropout as numbers of the dtype, where a graph has one byte: none in comparisons.
FAMILIES = {
    "GPT2LMHeadModel": ("resid_pdrop=0.0", "embd_pdrop=0.0", "attn_pdrop=0.0"),
    "BertForMaskedLM": ("hidden_dropout_prob=0.0", "attention_probs_dropout_prob=0.0"),
    "RobertaForMaskedLM": ("hidden_dropout_prob=0.0", "attention_probs_dropout_prob=0.0"),
    "DistilBertForMaskedLM": ("dropout=0.0", "attention_dropout=0.0"),
    "OPTForCausalLM": ("dropout=0.0",),
    "BloomForCausalLM": (),
    "GPTNeoXForCausalLM": ("num_hidden_layers=8",),
    "LlamaForCausalLM": (),
    "MistralForCausalLM": ("num_hidden_layers=8",),
    "Qwen2ForCausalLM": ("num_hidden_layers=8",),
    "T5ForConditionalGeneration": ("dropout_rate=0.0",),
    "ViTForImageClassification": (),
}
"""Families of the package transformers: by class, the fields of its config that differ from the defaults."""


def torch_memory(options: CompileOptions, dtype: torch.dtype) -> dict[str, int]:
    """Bytes by part, of the model, data, loss, optimizer and batch size that `options` name, which is built and run in
    `dtype`. `activations`: of the storages that the backward saves. `peak`: the most bytes of storages at a time,
    without the model's, inputs and gradients of parameters."""
    with default_type(dtype) if dtype is not torch.float32 else nullcontext():
        model, example = model_of_shapes(
            lambda: build_model(options), lambda model: example_of_one(model, options), options.training.batch_size
        )
        inputs = inputs_in(None if dtype is torch.float32 else dtype, example.inputs)
        step = both_steps(model, example, options)[0].train()
        given = {_storage(one) for one in (*model.parameters(), *model.buffers(), *inputs.values())}
        saved: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in given:
                saved[_storage(tensor)] = tensor
            return tensor

        gc.collect()
        with _Storages(given) as storages:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                outputs = step(*inputs.values())
            saved_bytes = sum(one.untyped_storage().nbytes() for one in saved.values())
            saved.clear()
            outputs[0].backward()
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            peak = storages.peak({_storage(one) for one in gradients})
        name = options.optimizer.name if options.optimizer else "adamw"
        kind = getattr(torch.optim, OPTIMIZERS[name].torch_name or "")
        momentum = {"momentum": options.optimizer.momentum} if options.optimizer and name == "sgd" else {}
        optimizer = kind(model.parameters(), lr=1e-3, foreach=False, **momentum)
        optimizer.step()
        states = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    held = {"parameters": model.parameters(), "gradients": gradients, "states": states}
    # Without counts of steps, which have no dimension.
    sizes = {part: sum(one.numel() * one.element_size() for one in held[part] if one.ndim) for part in held}
    return sizes | {"activations": saved_bytes, "peak": peak}


LARGEST_ERROR = 0.05
LARGEST_ERROR_OF_PEAK = 0.1
"""Torch keeps what a backward function saved until all of the function has run; a graph frees it by operator."""


def check_parts(options: CompileOptions, dtype: torch.dtype) -> None:
    """What `estimate-memory` says of each part, of one replica without master weights and recomputation, is nearly what
    torch counts."""
    assert options.optimizer is not None
    name = options.optimizer.name
    states = OPTIMIZERS[name].kept_states(options.optimizer.hyperparameters())
    wanted = str(dtype).removeprefix("torch.")
    stored = next(one for one in DTYPES if one.stored == wanted and not one.master)
    estimate = training_shapes(options).estimate(Choice(stored, "none", name, states, zero=1))
    ours = {part: getattr(estimate, part) for part in ("parameters", "gradients", "states", "activations")}
    ours["peak"] = ours["activations"] + estimate.temporaries
    counted = torch_memory(options, dtype)
    for part, size_bytes in counted.items():
        most = LARGEST_ERROR_OF_PEAK if part == "peak" else LARGEST_ERROR
        assert abs(ours[part] / size_bytes - 1) < most, (
            f"{part} of {options.model.target} in {dtype}: {ours}, {counted}"
        )


def _storage(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's, untyped
    """Notes when each new storage appears and when it is freed."""

    def __init__(self, given: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, untyped
        self._given = given
        self._live: dict[int, int] = {}  # by storage: the number of its life
        self._changes: list[tuple[int, int]] = []  # the number of a life, and bytes, negative at its end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := _storage(tensor)) not in self._given and key not in self._live:
                storage = tensor.untyped_storage()
                life = self._live[key] = len(self._changes)
                self._changes.append((life, storage.nbytes()))
                weakref.finalize(storage, self._end, key, life, storage.nbytes())
        return result

    def _end(self, key: int, life: int, size_bytes: int) -> None:
        self._live.pop(key, None)
        self._changes.append((life, -size_bytes))

    def peak(self, excluded: set[int]) -> int:
        """Without storages that are alive now and are `excluded`."""
        lives = {life for key, life in self._live.items() if key in excluded}
        most = now = 0
        for life, size_bytes in self._changes:
            if life not in lives:
                now += size_bytes
                most = max(most, now)
        return most
