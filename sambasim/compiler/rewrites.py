"""What to write in place of state that a graph would lose; and what is told of it. Each is applied by a test."""

from collections.abc import Collection, Mapping

from sambasim.compiler.explain import Obstacle

COUNTED = (
    'count in a buffer, self.register_buffer("steps", torch.zeros(())), by self.steps.add_(1), and choose by tensors: '
    "torch.where(self.steps < 10, a, b)"
)
_COPIED = 'keep it in a buffer, self.register_buffer("last", torch.zeros(size)), and copy into it: self.last.copy_(…)'
REWRITES = {
    "value": COUNTED,
    "tensor": _COPIED,
    "content": f"in place of a length, {COUNTED}; keep values in another one, self.last.copy_(…)",
    "gradient": "choose by a count in a buffer: w = torch.where(self.steps < n, self.a.weight.detach(), self.a.weight)",
    "position": "draw random numbers by PyTorch, torch.rand(()); keep other values in a buffer",
}
FIRST_CALL = (
    "compute it before, in __init__; or keep the value and a flag in buffers, and choose by "
    "torch.where(self.is_set, self.value, …)"
)
INTO_MODEL = "make the loss a submodule of the model, whose forward(x, target) returns it first; there"
KEPT = "changed by each call of the model, read by no later one, and so not in the PEF: {}"
OPENED = "opened by the model: {}; what it reads in files is as for the example batch in every step of a run"
DONE = "done by forward(), and not by a run: {}"
EVALUATED = "changed by forward() in evaluation too, and not by the evaluations of a run: {}"

RATES = "give a schedule, training.schedule; or train in several runs, each with its own rate, and resume"
DIFFERS = Obstacle(
    "a value that differs from call to call, though nothing that the model can reach has changed",
    "give it to the model as an input, or compute it before",
)
GENERATOR = Obstacle(
    "a torch.Generator of its own, whose state a graph does not keep", "leave out generator=, which draws from torch's"
)
_DRAWN = "draw the numbers once, and keep them in a buffer: self.register_buffer(name, torch.randn(…))"
SEEDED = Obstacle("a seed or a state of the generator of random numbers, which a graph does not set", _DRAWN)
MADE = Obstacle("a torch.Generator that forward() makes", _DRAWN)

_MOST_NAMES = 6


def notices(told: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """Of names of slots, and of what calls do outside of Python, by what is told of them."""
    shown = {what: [*names][:_MOST_NAMES] + ["…"] * (len(names) > _MOST_NAMES) for what, names in told.items()}
    return tuple(what.format(", ".join(names)) for what, names in shown.items() if names)
