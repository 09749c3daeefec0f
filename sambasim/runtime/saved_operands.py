"""Operands whose values a kernel trusts: they must be what the kernel before it has made, or checked.

A backward scatters gradients to the indices that its forward has saved, and looks at none of them. So the indices must
be that forward's result in the same graph, made from a tensor of the same shape by the same arguments; nodes change
nothing that exists, so that what they were made as is what they are.
"""

from collections.abc import Callable, Iterator, Mapping

from sambasim.runtime.call import Call, call_of

Check = Callable[[Call], Iterator[str]]


def _made_by(operator: str, operand: str, result: int, *alike: str) -> Check:
    """`operand` is `result` of `operator`, whose `self` has the shape of ours, and arguments `alike` are equal."""

    def check(call: Call) -> Iterator[str]:
        made = call.maker(operand)
        if made is None or made[0].node.operator != operator or made[1] != result:
            yield f"{operand} is not what {operator} has saved"
            return
        forward = made[0]
        if forward.shape("self") != call.shape("self"):
            yield f"{operand} was saved for {forward.shape('self')}, and is used for {call.shape('self')}"
        yield from (f"{name} is not that of {operator}" for name in alike if forward.given[name] != call.given[name])
        if "grad_output" in call.given and call.shape("grad_output") != call.shape(operand):
            yield f"gradients are {call.shape('grad_output')}, and {operand} is {call.shape(operand)}"

    return check


_WINDOW = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")


def _checked_target(operator: str) -> Check:
    """The classes were looked at by the loss, with as many classes and the same class to be ignored."""

    def check(call: Call) -> Iterator[str]:
        for node in call.makers.nodes(operator):
            loss = call_of(node, call.types, call.makers)
            same = all(
                loss.given[name] == call.given[name] for name in ("target", "ignore_index", "reduction", "weight")
            )
            if same and loss.shape("self") == call.shape("self"):
                return
        yield f"target was not looked at by {operator}"

    return check


def _embedding(call: Call) -> Iterator[str]:
    if call.given["scale_grad_by_freq"] is not True:
        return  # without it, each index is compared with the number of rows
    for node in call.makers.nodes("aten.embedding.default"):
        forward = call_of(node, call.types, call.makers)
        rows = (forward.shape("weight") or (0,))[0]
        if forward.given["indices"] == call.given["indices"] and rows == call.given["num_weights"]:
            return
    yield "indices were not looked at by aten.embedding.default"


_BAGS = ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
_SAVED_OF_BAGS: Mapping[str, int] = {"offset2bag": 1, "bag_size": 2, "maximum_indices": 3}


def _embedding_bag(call: Call) -> Iterator[str]:
    made = {name: call.maker(name) for name in _SAVED_OF_BAGS if name in call.given}
    for name, found in made.items():
        if found is None or found[0].node.operator not in _BAGS or found[1] != _SAVED_OF_BAGS[name]:
            yield f"{name} is not what aten._embedding_bag has saved"
            return
    forwards = [found[0] for found in made.values() if found is not None]
    if any(forward.node is not forwards[0].node for forward in forwards):
        yield "what was saved is of several bags"
        return
    forward = forwards[0]
    weight = forward.shape("weight") or (0, 0)
    rows = call.given["num_weights"] if "num_weights" in call.given else (call.shape("weight") or (0,))[0]
    if forward.given["indices"] != call.given["indices"] or forward.given["mode"] != call.given["mode"]:
        yield "indices and mode are not those of aten._embedding_bag"
    if rows != weight[0]:
        yield f"there are {rows} rows, and {weight[0]} in aten._embedding_bag"
    if forward.given["per_sample_weights"] != call.given.get("per_sample_weights", forward.given["per_sample_weights"]):
        yield "per_sample_weights are not those of aten._embedding_bag"
    bags = (forward.shape("offsets") or (0,))[0] - bool(forward.given["include_last_offset"])
    if call.shape("grad") != (bags, weight[-1]) or ("weight" in call.given and call.shape("weight") != weight):
        yield f"gradients are {call.shape('grad')}, for {bags} bags of {weight}"


def _recurrent(call: Call) -> Iterator[str]:
    saved = {"output": 0, "hy_": 1, "cy_": 2, "workspace": 3}
    made = {name: call.maker(name) for name in saved}
    forward = made["workspace"][0] if made["workspace"] is not None else None
    if forward is None or forward.node.operator != "aten.mkldnn_rnn_layer.default":
        yield "workspace is not what aten.mkldnn_rnn_layer has saved"
        return
    for name, found in made.items():
        if found is None or found[0].node is not forward.node or found[1] != saved[name]:
            yield f"{name} is not what aten.mkldnn_rnn_layer has saved"
    pairs = {
        "input": "input", "weight1": "weight0", "weight2": "weight1", "weight3": "weight2", "weight4": "weight3",
        "hx_": "hx_", "cx_tmp": "cx_",
    }  # fmt: skip
    alike = ("reverse", "mode", "hidden_size", "num_layers", "has_biases", "train", "bidirectional", "batch_first")
    for ours, theirs in (pairs | dict(zip(alike, alike, strict=True))).items():
        if call.given[ours] != forward.given[theirs]:
            yield f"{ours} is not that of aten.mkldnn_rnn_layer"


SAVED: Mapping[str, Check] = {
    f"aten.{name}.default": check
    for name, check in {
        "max_pool2d_with_indices_backward": _made_by(
            "aten.max_pool2d_with_indices.default", "indices", 1, *_WINDOW
        ),
        "max_pool3d_with_indices_backward": _made_by(
            "aten.max_pool3d_with_indices.default", "indices", 1, *_WINDOW
        ),
        "adaptive_max_pool2d_backward": _made_by("aten.adaptive_max_pool2d.default", "indices", 1),
        "adaptive_max_pool3d_backward": _made_by("aten.adaptive_max_pool3d.default", "indices", 1),
        "nll_loss_backward": _checked_target("aten.nll_loss_forward.default"),
        "nll_loss2d_backward": _checked_target("aten.nll_loss2d_forward.default"),
        "embedding_dense_backward": _embedding,
        "_embedding_bag_backward": _embedding_bag,
        "_embedding_bag_dense_backward": _embedding_bag,
        "_embedding_bag_per_sample_weights_backward": _embedding_bag,
        "mkldnn_rnn_layer_backward": _recurrent,
    }.items()
}  # fmt: skip
"""By operator: what is wrong with where its operands come from."""
