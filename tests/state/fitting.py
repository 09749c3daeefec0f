"""Refusals that name what a model reads or changes, though it is no slot of Python: gradients of the last step, what a
backward changes, memory that two have, weights that are trained and changed, and losses with a state."""

from torch import Tensor, nn
from torch.nn import functional

from sambasim.compiler.capture import explain
from tests.state.case import cases, given, remedy


class Normed:
    """The loss over its first value."""

    first: Tensor | None = None

    def __call__(self, result: Tensor, target: Tensor) -> Tensor:
        value = functional.mse_loss(result, target)
        if self.first is None:
            self.first = value.detach()  # here
        return value / self.first


NORM = given(norm=lambda: nn.BatchNorm1d(4))
BUFFER_SAYS = ("the buffer rows and the buffer first are", "take the part of it")
ARRAY_SAYS = ("the memory of the buffer n as an array of NumPy", "self.n.add_(1)")
HOOK_SAYS = (remedy("a tensor that a hook"),)
GRADIENT_SAYS = (explain.REWRITES["gradient"], "requires_grad")
WEIGHT_SAYS = ("w = F.normalize(self.a.weight)", "trains other numbers")


cases(__name__)("""
import threading
from sambasim.compiler.capture import trial
from torch.utils.checkpoint import checkpoint
case gradient_of_the_last_step: REFUSED, says=(trial._GRAD.rewrite,)
    last = net.b.weight.grad  # here
    return h if last is None else h / (1 + last.norm())
rewrite:
    return h
case batch_norm_in_a_checkpoint: REFUSED, NORM, says=(remedy("a buffer that is changed twice"),), own_losses=True
    return checkpoint(lambda x: net.norm(x), h, use_reentrant=False) - net.norm.running_mean  # here
rewrite: NORM
    return net.norm(h) - net.norm.running_mean.clone()
case norm_that_a_hook_keeps: REFUSED, given(norm=lambda: torch.ones(())), says=HOOK_SAYS, own_losses=True
    def hook(g):
        net.norm.mul_(0.9).add_(g.detach().norm(), alpha=0.1)  # here
        return g / net.norm
    if h.requires_grad:
        h.register_hook(hook)
    return h * 1.5
rewrite norm_of_this_gradient:
    if h.requires_grad:
        h.register_hook(lambda g: g / (1 + g.norm()))
    return h * 1.5

# Memory that two have.
def _views(net):
    net.register_buffer("rows", torch.zeros(2, 4))
    net.register_buffer("first", net.rows[0])
case buffer_that_is_a_row_of_another: REFUSED, _views, says=BUFFER_SAYS, where=None, whole=True
    before = net.first.clone()
    net.rows.mul_(0.5).add_(h.detach().mean(0))
    return h - before
rewrite row_of_a_buffer: given(rows=lambda: torch.zeros(2, 4))
    before = net.rows[0].clone()
    net.rows.mul_(0.5).add_(h.detach().mean(0))
    return h - before
def _array(net):
    net.register_buffer("n", torch.zeros(1))
    net.array = net.n.numpy()
case buffer_that_numpy_counts: REFUSED, _array, says=ARRAY_SAYS
    net.array += 1  # here
    return h * torch.where(net.n[0] < 3, 1.0, 0.5)
rewrite buffer_that_pytorch_counts: given(n=lambda: torch.zeros(1))
    net.n.add_(1)
    return h * torch.where(net.n[0] < 3, 1.0, 0.5)

# What no buffer is, and changes what later calls compute.
case tensor_that_evaluation_reads: REFUSED, lambda net: setattr(net, "plain", zero()), says=("model.plain, ",)
    if net.training:
        net.plain = h.detach().mean()  # here
    return h - net.plain
case count_that_the_backward_reads: REFUSED, given(n=0), says=("model.n, ", explain.REWRITES["value"])
    net.n += 1  # here
    rate = 1 / net.n
    if h.requires_grad:
        h.register_hook(lambda g: g * rate)
def _layer(frozen):
    return nn.Linear(4, 4).requires_grad_(not frozen)
case layer_trained_from_a_step_on: REFUSED, given(n=0, c=lambda: _layer(frozen=True)), says=GRADIENT_SAYS
    net.n += 1
    if net.n == 3:
        net.c.requires_grad_(True)  # here
    return net.c(h)
rewrite weights_chosen_by_a_count: given(steps=zero, c=lambda: _layer(frozen=False))
    net.steps.add_(1)
    weight, bias = (torch.where(net.steps < 3, one.detach(), one) for one in (net.c.weight, net.c.bias))
    return functional.linear(h, weight, bias)
case first_call_by_an_event: REFUSED, given(first=threading.Event), says=("model.first._flag",), whole=True
    if not net.first.is_set():
        net.first.set()  # here
        return h * 0.1
rewrite first_call_by_a_count: given(steps=zero)
    net.steps.add_(1)
    return torch.where(net.steps < 2, h * 0.1, h)
def _half(net, h):
    return h * 0.5
def _whole(net, h):
    net.act = net.then_half
    return h
def _methods(net):
    net.then_half = _half.__get__(net)
    net.act = _whole.__get__(net)
case method_that_replaces_itself: REFUSED, _methods, says=("model.act, ",), where="net.act = net.then_half", whole=True
    return net.act(h)
rewrite method_chosen_by_a_count: given(steps=zero)
    net.steps.add_(1)
    return torch.where(net.steps < 2, h, h * 0.5)
def _with_draws(net):
    net.register_buffer("noise", torch.randn(4, generator=torch.Generator().manual_seed(3)))
case generator_made_in_forward: REFUSED, says=(explain.MADE.rewrite, explain.MADE.what), whole=True
    own = torch.Generator().manual_seed(3)
    return h + torch.randn(4, generator=own)  # here
rewrite: _with_draws
    return h + net.noise
class Trainer:
    made = None
    steps = 0
    @classmethod
    def of_process(cls):
        cls.made = cls.made or cls()
        return cls.made
case count_of_an_object_that_the_first_call_makes: REFUSED, says=("Trainer.made.steps, ",), whole=True
    trainer = Trainer.of_process()
    trainer.steps += 1  # here
    return h * (1.0 if trainer.steps < 3 else 0.5)
rewrite: given(steps=zero)
    net.steps.add_(1)
    return h * torch.where(net.steps < 3, 1.0, 0.5)

# Weights that are trained, and changed in forward.
case weight_clamped_in_forward: REFUSED, says=(remedy("a trained parameter"),), own_losses=True
    with torch.no_grad():
        net.b.weight.clamp_(-0.25, 0.25)  # here
rewrite:
    return h + functional.linear(h, net.b.weight.clamp(-0.25, 0.25))
case parameter_made_anew: REFUSED, says=("which forward() replaces",), whole=True
    net.a.bias = nn.Parameter(net.a.bias * 0.5)  # here
case weight_replaced_in_forward: REFUSED, says=WEIGHT_SAYS, own_losses=True
    net.b.weight.data = functional.normalize(net.b.weight.data)  # here
rewrite:
    return h + functional.linear(h, functional.normalize(net.b.weight), net.b.bias)

# Losses with a state.
built loss_over_its_first_value: REFUSED, says=("loss.first, ", f"{explain.INTO_MODEL} {explain.FIRST_CALL}")
    return with_loss(Normed())
rebuilt:
    def forward(net, x, y):
        loss = functional.mse_loss(net.model(x), y)
        net.value.copy_(torch.where(net.is_set, net.value, loss.detach()))
        net.is_set.fill_(True)
        return loss / net.value.clone()
    return made(forward, model=Outputs, value=zero, is_set=lambda: torch.zeros((), dtype=torch.bool))
""")
